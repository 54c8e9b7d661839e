"""LoRA adapters on low-bit linears: the layer, and the dispatch that makes PEFT use it."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import torch
from peft.tuners import tuners_utils
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .packed_linear import PackedLinear


ALL_LINEAR = "all-linear"


def register_lora_dispatch(lora_model: ModuleType) -> None:
    """Make PEFT's LoRA know `PackedLinear`; `lora_model` is `peft.tuners.lora.model`. Calling it again does nothing.

    PEFT asks its dispatchers in turn and offers no public way to add one that a saved adapter would remember, so the
    last of them, the default, is asked after ours.
    """
    dispatch_default = lora_model.dispatch_default
    if getattr(dispatch_default, "knows_low_bit_linear", False):
        return

    def dispatch(target: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> nn.Module | None:
        base_layer = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base_layer, PackedLinear):
            return LowBitLoraLinear(target, adapter_name, config=config, **kwargs)
        return dispatch_default(target, adapter_name, config=config, **kwargs)

    dispatch.knows_low_bit_linear = True
    lora_model.dispatch_default = dispatch
    _include_in_all_linear()


def _include_in_all_linear() -> None:
    """Let `target_modules="all-linear"` mean low-bit linears too; PEFT looks for `nn.Linear` and `Conv1D` alone."""
    include_linears = tuners_utils._maybe_include_all_linear_layers

    def include_all(peft_config: Any, model: nn.Module) -> Any:
        targets = getattr(peft_config, "target_modules", None)
        peft_config = include_linears(peft_config, model)
        if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
            wrapped = [f"{name}." for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
            peft_config.target_modules |= {
                name
                for name, module in model.named_modules()
                if isinstance(module, PackedLinear) and not name.startswith(tuple(wrapped))
            }
        return peft_config

    tuners_utils._maybe_include_all_linear_layers = include_all


class LowBitLoraLinear(nn.Module, LoraLayer):
    """LoRA on a [`PackedLinear`]: the packed weight is frozen, the adapter trains in its own dtype.

    Merging into packed codes would round the adapter away, so `merge` is refused until the base is float again.
    """

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: Any, r: int = 0, lora_alpha: int = 1, **kwargs: Any
    ):
        super().__init__()
        for option in ("use_dora", "lora_bias"):
            if getattr(config, option, False):
                raise ValueError(f"{option}=True is not supported on {type(base_layer).__name__}; use plain LoRA.")
        if isinstance(config.init_lora_weights, str) and config.init_lora_weights not in ("gaussian", "orthogonal"):
            raise ValueError(
                f"init_lora_weights={config.init_lora_weights!r} reads a float weight, which "
                f"{type(base_layer).__name__} does not have; allowed are True, False, 'gaussian' and 'orthogonal'."
            )
        LoraLayer.__init__(self, base_layer)
        self.fan_in_fan_out = False
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._check_forward_args(x, *args, **kwargs)
        adapter_names = kwargs.pop("adapter_names", None)
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
            return self.base_layer(x)
        if adapter_names is not None:
            raise ValueError(
                "adapter_names= (different adapters in one batch) is not supported on low-bit linears; "
                "use set_adapter and one adapter a batch."
            )
        output = self.base_layer(x)
        if self.merged:
            return output
        for name in self.active_adapters:
            if name in self.lora_A:
                lora_A, lora_B = self.lora_A[name], self.lora_B[name]
                hidden_states = self.lora_dropout[name](x.to(lora_A.weight.dtype))
                output = output + (lora_B(lora_A(hidden_states)) * self.scaling[name]).to(output.dtype)
        return output

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return `scaling * B A`, `[out_features, in_features]`."""
        return self.scaling[adapter] * (self.lora_B[adapter].weight @ self.lora_A[adapter].weight)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters to the base weight, if that is float.

        Raises:
            ValueError: while the base is packed, or with `safe_merge` when the sum is not finite.
        """
        base_layer = self.get_base_layer()
        if isinstance(base_layer, PackedLinear):
            raise ValueError(
                "An adapter cannot be merged into packed low-bit weights: rounding would undo it. Call "
                "peft_model.get_base_model().dequantize() first, then merge_and_unload() gives a float model."
            )
        transposed = not isinstance(base_layer, nn.Linear)
        for name in adapter_names or self.active_adapters:
            if name in self.merged_adapters or name not in self.lora_A:
                continue
            delta = self.get_delta_weight(name)
            merged = base_layer.weight + (delta.T if transposed else delta).to(base_layer.weight.dtype)
            if safe_merge and not torch.isfinite(merged).all():
                raise ValueError(f"merging the adapter {name!r} gives NaN or infinite weights.")
            base_layer.weight.data = merged.detach()
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Take merged adapters out of the float base weight again."""
        if not self.merged:
            warnings.warn("No adapter is merged; unmerge does nothing.", stacklevel=2)
        base_layer = self.get_base_layer()
        while self.merged_adapters:
            delta = self.get_delta_weight(self.merged_adapters.pop())
            delta = delta if isinstance(base_layer, nn.Linear) else delta.T
            base_layer.weight.data -= delta.to(base_layer.weight.dtype)

    def __repr__(self) -> str:
        return "lora." + super().__repr__()
