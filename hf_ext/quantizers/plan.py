"""Which linears are quantized and which stay float, decided and checked before any work."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from ..core.modules import (
    SlicedExperts,
    decoder_blocks,
    fused_experts,
    linear_shape,
    named_linears,
    replace_module,
    why_not_sliceable,
)


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .base_config import LowBitConfig


# Parts of the names of linears that choose experts: small, and a wrong choice costs a whole expert.
ROUTER_NAMES = ("gate", "router", "shared_expert_gate", "wg")


@dataclass
class QuantizationPlan:
    """`shapes`: of the linears to quantize, by name; `experts`: fused modules to slice first; `skipped`: the other
    linears."""

    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)
    skipped: dict[str, tuple[tuple[int, int], str]] = field(default_factory=dict)

    @property
    def targets(self) -> list[str]:
        """The names of the linears to quantize."""
        return list(self.shapes)


def plan_quantization(model: PreTrainedModel, config: LowBitConfig) -> QuantizationPlan:
    """Decide for every linear of `model`, on its architecture alone, so that saving and loading agree.

    Args:
        model: the float model; its weights may be on the meta device, its experts fused or already sliced.
        config: the method's options, which say what stays float beside the safe defaults and which shapes fit.

    Raises:
        ValueError: nothing to quantize, a pattern that matches nothing, experts of an unknown layout, or shapes that
            `config` does not fit, each naming the modules.
    """
    patterns = list(config.modules_to_not_convert or [])
    _refuse_adapters(model)
    _refuse_idle_patterns(model, patterns)
    blocks_name, _ = decoder_blocks(model)
    plan = QuantizationPlan(experts=_plan_experts(model, blocks_name, patterns))
    default_skips = get_keys_to_not_convert(model)
    for name, linear in named_linears(model):
        reason = _reason_to_skip(name, blocks_name, patterns, default_skips)
        if reason is None:
            plan.shapes[name] = linear_shape(linear)
        else:
            plan.skipped[name] = (linear_shape(linear), reason)
    for experts in plan.experts:
        for name, shape in _sliced_names(experts, model.get_submodule(experts)).items():
            if is_named(name, patterns):
                plan.skipped[name] = (shape, "named in modules_to_not_convert")
            else:
                plan.shapes[name] = shape
    if not plan.shapes:
        raise ValueError("There is no linear left to quantize: modules_to_not_convert covers every decoder block.")
    config.check_shapes(plan.shapes)
    return plan


def slice_experts(model: nn.Module, plan: QuantizationPlan) -> None:
    """Replace the fused experts of `plan` by `SlicedExperts`."""
    for name in plan.experts:
        replace_module(model, name, SlicedExperts(model.get_submodule(name)))


def fuse_experts(model: nn.Module) -> None:
    """Replace every `SlicedExperts` whose linears are all float by the fused module it came from."""
    for name, module in list(model.named_modules()):
        if isinstance(module, SlicedExperts) and module.is_float():
            replace_module(model, name, module.fuse())


def _reason_to_skip(name: str, blocks_name: str, patterns: list[str], default_skips: list[str]) -> str | None:
    if is_named(name, patterns):
        return "named in modules_to_not_convert"
    if not name.startswith(f"{blocks_name}."):
        return "outside the decoder blocks"
    if any(part in ROUTER_NAMES for part in name.split(".")):
        return "router"
    if not should_convert_module(name, default_skips):
        return "output or tied layer"
    return None


def _plan_experts(model: PreTrainedModel, blocks_name: str, patterns: list[str]) -> list[str]:
    names = []
    for name, experts in fused_experts(model).items():
        if not name.startswith(f"{blocks_name}.") or is_named(name, patterns):
            continue
        reason = why_not_sliceable(experts)
        if reason is not None:
            raise ValueError(
                f"The experts {name!r} ({type(experts).__name__}) cannot be quantized one by one: {reason}. "
                f"Leave them float: modules_to_not_convert=[{name.rpartition('.')[2]!r}]."
            )
        names.append(name)
    return names


def _sliced_names(name: str, experts: nn.Module) -> dict[str, tuple[int, int]]:
    return {
        f"{name}.{index}.{child}": tuple(stack.shape[1:])
        for index in range(experts.gate_up_proj.shape[0])
        for child, stack in (("gate_up", experts.gate_up_proj), ("down", experts.down_proj))
    }


def is_named(name: str, patterns: list[str]) -> bool:
    """Whether a pattern names the module `name` or a module that holds it."""
    parts = name.split(".")
    return not all(should_convert_module(".".join(parts[:end]), patterns) for end in range(1, len(parts) + 1))


def _refuse_adapters(model: nn.Module) -> None:
    adapted = next((name for name, module in model.named_modules() if hasattr(module, "base_layer")), None)
    if adapted is not None:
        raise ValueError(
            f"{adapted} carries an adapter; its small float matrices are no linears to quantize. Merge it first "
            "(peft_model.merge_and_unload()), or quantize the base model and put the adapter on that."
        )


def _refuse_idle_patterns(model: nn.Module, patterns: list[str]) -> None:
    names = [name for name, _ in named_linears(model)] + list(fused_experts(model))
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"modules_to_not_convert: {pattern!r} is no regular expression ({error}). Write a name, or .* for any."
            ) from error
        if not any(is_named(name, [pattern]) for name in names):
            examples = ", ".join([name for name, _ in named_linears(model)][:3])
            raise ValueError(
                f"modules_to_not_convert: {pattern!r} matches no linear of {type(model).__name__}, and no module "
                f"that holds one. Its linears are named like {examples}."
            )
