"""What every linear layer with a packed weight has, whatever the packing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.modules import set_linear_weight


class PackedLinear(nn.Module):
    """A linear layer without a `weight`; `dequantize()` gives one. PEFT puts LoRA adapters on every subclass.

    Args:
        in_features (`int`): columns of the weight.
        out_features (`int`): rows of the weight.
        bias (`bool`): whether there is one.
        dtype (`torch.dtype`): of the bias.
        source_class (`type`): what `to_float` gives back: `nn.Linear` or `Conv1D`.
    """

    # Buffers whose dtype is part of the format: `model.to(torch.bfloat16)` would round them, and the reloaded model
    # would differ from this one.
    fixed_dtype_buffers: tuple[str, ...] = ()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        source_class: type = nn.Linear,
    ):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.source_class = source_class
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype), requires_grad=False)
        else:
            self.register_parameter("bias", None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight `[out_features, in_features]`, computed in fp32 and cast to `dtype`."""
        raise NotImplementedError(f"{type(self).__name__} must say what its weight is: override dequantize")

    @property
    def qweight(self) -> Tensor:
        """A packed buffer, under the name by which PEFT finds a quantized layer's device."""
        return next(self.buffers())

    def to_float(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the `nn.Linear` or `Conv1D` with the dequantized weight."""
        device = self.qweight.device
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

    def _apply(self, fn, recurse: bool = True) -> PackedLinear:
        fixed = {name: getattr(self, name) for name in self.fixed_dtype_buffers}
        super()._apply(fn, recurse)
        for name, before in fixed.items():
            after = getattr(self, name)
            if after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self
