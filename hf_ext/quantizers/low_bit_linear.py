"""The linear layer with a packed low-bit weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.modules import linear_shape
from ..ops.activations import fake_quantize_activations
from ..ops.cpu_kernels import CpuWeight, prepare_cpu
from ..ops.low_bit_linear import low_bit_linear
from ..ops.packed_weight import PackedWeight, dequantize
from ..ops.packing import packed_rows
from .packed_linear import PackedLinear


class LowBitLinear(PackedLinear):
    """`y = x W^T + b` with `W = (code - zero) * scale`, codes of 2, 3, 4 or 8 bits, scale and zero a group of columns.

    Made by a quantizer, in place of an `nn.Linear` or a `Conv1D`. It has no `weight`; `dequantize()` gives one.

    Args:
        in_features (`int`): columns of the weight.
        out_features (`int`): rows of the weight.
        bits (`int`): 2, 3, 4 or 8.
        group_size (`int`): columns that share a scale; -1 for the whole row. The last group may be shorter.
        zero_point (`int`, *optional*): the zero of every group; `None` where each group has its own.
        activation_bits (`int`): 8 rounds the inputs to 256 values a token; 16 leaves them.
        bias (`bool`): whether there is one.
        dtype (`torch.dtype`): of the bias.
        source_class (`type`): what `to_float` gives back: `nn.Linear` or `Conv1D`.

    Buffers:
        weight_packed: `uint8` `[ceil(in / 8) * bits, out]`, see [`~ops.packing.pack_codes`].
        weight_scale: `float32` `[out, groups]`; stays fp32 when the model is cast.
        weight_zero: `uint8` `[out, groups]`; absent with a `zero_point`.
    """

    fixed_dtype_buffers = ("weight_scale",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bits: int,
        group_size: int = -1,
        zero_point: int | None = None,
        activation_bits: int = 16,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        source_class: type = nn.Linear,
    ):
        super().__init__(in_features, out_features, bias, device, dtype, source_class)
        self.bits = bits
        self.group_size = group_size
        self.zero_point = zero_point
        self.activation_bits = activation_bits
        groups = 1 if group_size == -1 else -(-in_features // group_size)
        rows = packed_rows(in_features, bits)
        self.register_buffer("weight_packed", torch.zeros(rows, out_features, dtype=torch.uint8, device=device))
        self.register_buffer("weight_scale", torch.ones(out_features, groups, dtype=torch.float32, device=device))
        if zero_point is None:
            self.register_buffer("weight_zero", torch.zeros(out_features, groups, dtype=torch.uint8, device=device))
        self._packed: PackedWeight | None = None
        self._cpu_weight: tuple[CpuWeight | None] | None = None

    @classmethod
    def skeleton(cls, linear: nn.Module, bits: int, group_size: int, **options: int | None) -> LowBitLinear:
        """Return a layer of the shape of `linear`, on its device, for a checkpoint to load into."""
        out_features, in_features = linear_shape(linear)
        return cls(
            in_features,
            out_features,
            bits,
            group_size,
            **options,
            bias=linear.bias is not None,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
            source_class=type(linear),
        )

    @classmethod
    def from_packed(cls, linear: nn.Module, packed: PackedWeight, **options: int | None) -> LowBitLinear:
        """Return a layer with the weight `packed` and the bias of `linear`."""
        device = linear.weight.device
        layer = cls.skeleton(linear, packed.bits, packed.group_size, **options)
        layer.weight_packed = packed.codes.to(device)
        layer.weight_scale = packed.scale.to(device)
        if layer.zero_point is None:
            layer.weight_zero = packed.zero.to(device)
        elif (packed.zero != layer.zero_point).any():
            raise ValueError(f"the weight has other zeros than zero_point={layer.zero_point}; pass zero_point=None.")
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
        return layer

    @property
    def packed(self) -> PackedWeight:
        """The buffers as the `PackedWeight` that `hf_ext.ops` works with."""
        packed = self._packed
        if packed is None or packed.codes is not self.weight_packed or packed.scale is not self.weight_scale:
            packed = self._packed = PackedWeight(
                self.weight_packed, self.weight_scale, self._zero(), self.bits, self.in_features, self.group_size
            )
            self._cpu_weight = None
        return packed

    def _zero(self) -> Tensor:
        if self.zero_point is None:
            return self.weight_zero
        return torch.full_like(self.weight_scale, self.zero_point, dtype=torch.uint8)

    def cpu_weight(self) -> CpuWeight | None:
        """Return the copy of the weight in the layout of PyTorch's CPU kernels, made at the first call."""
        packed = self.packed
        if self._cpu_weight is None:
            self._cpu_weight = (prepare_cpu(packed),)
        return self._cpu_weight[0]

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = fake_quantize_activations(hidden_states, self.activation_bits)
        # The kernels serve bf16 only; without it their copy would be memory for nothing.
        on_kernel = hidden_states.dtype is torch.bfloat16 and hidden_states.device.type == "cpu"
        return low_bit_linear(hidden_states, self.packed, self.bias, self.cpu_weight() if on_kernel else None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize(self.packed, dtype)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._packed = self._cpu_weight = None  # the buffers were written in place

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group_size={self.group_size}, bias={self.bias is not None}"
        )
