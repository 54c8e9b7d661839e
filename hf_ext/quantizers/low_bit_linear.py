"""The linear layer with a packed low-bit weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.modules import linear_shape, set_linear_weight
from ..ops.cpu_kernels import CpuWeight, prepare_cpu
from ..ops.low_bit_linear import low_bit_linear
from ..ops.packed_weight import PackedWeight, dequantize
from ..ops.packing import packed_rows


class LowBitLinear(nn.Module):
    """`y = x W^T + b` with `W = (code - zero) * scale`, codes of 2, 3, 4 or 8 bits, scale and zero a group of columns.

    Made by a quantizer, in place of an `nn.Linear` or a `Conv1D`. It has no `weight`; `dequantize()` gives one.

    Args:
        in_features (`int`): columns of the weight.
        out_features (`int`): rows of the weight.
        bits (`int`): 2, 3, 4 or 8.
        group_size (`int`): columns that share a scale; -1 for the whole row. The last group may be shorter.
        bias (`bool`): whether there is one.
        dtype (`torch.dtype`): of the bias.
        source_class (`type`): what `to_float` gives back: `nn.Linear` or `Conv1D`.

    Buffers:
        weight_packed: `uint8` `[ceil(in / 8) * bits, out]`, see [`~ops.packing.pack_codes`].
        weight_scale: `float32` `[out, groups]`; stays fp32 when the model is cast.
        weight_zero: `uint8` `[out, groups]`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bits: int,
        group_size: int = -1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        source_class: type = nn.Linear,
    ):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.bits = bits
        self.group_size = group_size
        self.source_class = source_class
        groups = 1 if group_size == -1 else -(-in_features // group_size)
        rows = packed_rows(in_features, bits)
        self.register_buffer("weight_packed", torch.zeros(rows, out_features, dtype=torch.uint8, device=device))
        self.register_buffer("weight_scale", torch.ones(out_features, groups, dtype=torch.float32, device=device))
        self.register_buffer("weight_zero", torch.zeros(out_features, groups, dtype=torch.uint8, device=device))
        self._packed: PackedWeight | None = None
        self._cpu_weight: tuple[CpuWeight | None] | None = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype), requires_grad=False)
        else:
            self.register_parameter("bias", None)

    @classmethod
    def skeleton(cls, linear: nn.Module, bits: int, group_size: int) -> LowBitLinear:
        """Return a layer of the shape of `linear`, on its device, for a checkpoint to load into."""
        out_features, in_features = linear_shape(linear)
        return cls(
            in_features,
            out_features,
            bits,
            group_size,
            bias=linear.bias is not None,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
            source_class=type(linear),
        )

    @classmethod
    def from_packed(cls, linear: nn.Module, packed: PackedWeight) -> LowBitLinear:
        """Return a layer with the weight `packed` and the bias of `linear`."""
        device = linear.weight.device
        layer = cls.skeleton(linear, packed.bits, packed.group_size)
        layer.weight_packed = packed.codes.to(device)
        layer.weight_scale = packed.scale.to(device)
        layer.weight_zero = packed.zero.to(device)
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
        return layer

    @property
    def qweight(self) -> Tensor:
        """`weight_packed` under the name by which PEFT finds a quantized layer's device."""
        return self.weight_packed

    @property
    def packed(self) -> PackedWeight:
        """The buffers as the `PackedWeight` that `hf_ext.ops` works with."""
        packed = self._packed
        if packed is None or packed.codes is not self.weight_packed or packed.scale is not self.weight_scale:
            packed = self._packed = PackedWeight(
                self.weight_packed, self.weight_scale, self.weight_zero, self.bits, self.in_features, self.group_size
            )
            self._cpu_weight = None
        return packed

    def cpu_weight(self) -> CpuWeight | None:
        """Return the copy of the weight in the layout of PyTorch's CPU kernels, made at the first call."""
        packed = self.packed
        if self._cpu_weight is None:
            self._cpu_weight = (prepare_cpu(packed),)
        return self._cpu_weight[0]

    def forward(self, hidden_states: Tensor) -> Tensor:
        # The kernels serve bf16 only; without it their copy would be memory for nothing.
        on_kernel = hidden_states.dtype is torch.bfloat16 and hidden_states.device.type == "cpu"
        return low_bit_linear(hidden_states, self.packed, self.bias, self.cpu_weight() if on_kernel else None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight `[out_features, in_features]`, computed in fp32 and cast to `dtype`."""
        return dequantize(self.packed, dtype)

    def to_float(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the `nn.Linear` or `Conv1D` with the dequantized weight."""
        device = self.weight_packed.device
        if self.source_class is Conv1D:
            linear = Conv1D(self.out_features, self.in_features).to(device, dtype)
        else:
            linear = nn.Linear(
                self.in_features, self.out_features, bias=self.bias is not None, device=device, dtype=dtype
            )
        set_linear_weight(linear, self.dequantize(dtype))
        if self.bias is not None:
            with torch.no_grad():
                linear.bias.copy_(self.bias)
        return linear.requires_grad_(False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LowBitLinear:
        # `model.to(torch.bfloat16)` would round the scales, and the reloaded model would differ from this one.
        scale = self.weight_scale
        super()._apply(fn, recurse)
        if self.weight_scale.dtype != torch.float32:
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._packed = self._cpu_weight = None  # the buffers were written in place

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group_size={self.group_size}, bias={self.bias is not None}"
        )
