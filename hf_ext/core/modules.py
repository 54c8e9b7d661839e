"""Finding the parts of a decoder-only Transformers model: its blocks, their linears, and fused experts taken apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


if TYPE_CHECKING:
    from transformers import PreTrainedModel


LINEAR_CLASSES = (nn.Linear, Conv1D)
# Modules of these kinds own 3-D parameters that are no stacks of matrices.
CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)


def decoder_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of the decoder blocks of `model`.

    Raises:
        ValueError: if no module list has `config.num_hidden_layers` entries, or the model has an encoder.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model; only decoder-only models are walked by blocks."
        )
    text_model = model.get_decoder()  # a model of several modalities has other lists of blocks, too
    prefix = next((name for name, module in model.named_modules() if module is text_model), "")
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and f"{name}.".startswith(f"{prefix}." if prefix else "")
    }
    for name, module in lists.items():
        if len(module) == config.num_hidden_layers and any(True for _ in named_linears(module)):
            return name, module
    found = ", ".join(f"{name} ({len(module)})" for name, module in lists.items()) or "none"
    raise ValueError(
        f"No list of {config.num_hidden_layers} decoder blocks with linear layers in {type(model).__name__}; "
        f"module lists found: {found}. Only decoder-only Transformers models are supported."
    )


def named_linears(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield `(name, linear)` for every `nn.Linear` and `Conv1D` inside `module`; no subclasses."""
    for name, child in module.named_modules():
        if type(child) in LINEAR_CLASSES:
            yield name, child


def linear_shape(linear: nn.Module) -> tuple[int, int]:
    """Return `(out_features, in_features)`."""
    if isinstance(linear, Conv1D):
        return linear.nf, linear.nx
    return linear.out_features, linear.in_features


def linear_weight(linear: nn.Module) -> Tensor:
    """Return the weight as `[out_features, in_features]`; a `Conv1D` stores the transpose."""
    return linear.weight.T if isinstance(linear, Conv1D) else linear.weight


def weight_of(linear: nn.Module) -> Tensor:
    """Return the weight as a detached fp32 `[out_features, in_features]`: what methods compute with."""
    return linear_weight(linear).detach().float()


def set_linear_weight(linear: nn.Module, weight: Tensor) -> None:
    """Write `weight`, `[out_features, in_features]`, into `linear` in the dtype and layout it has."""
    with torch.no_grad():
        linear_weight(linear).copy_(weight)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent_name, _, child_name = name.rpartition(".")
    setattr(model.get_submodule(parent_name), child_name, module)


class Expert(nn.Module):
    """One expert as two linears: `gate_up` `[2 * intermediate, hidden]` and `down` `[hidden, intermediate]`."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, apply_gate: Callable[[Tensor], Tensor]):
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.apply_gate = apply_gate

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down(self.apply_gate(self.gate_up(hidden_states)))


class SlicedExperts(nn.ModuleList):
    """The experts of a mixture as one pair of linears each, so that each is seen, quantized and stored on its own.

    Takes the place of a fused experts module of Transformers 5 (3-D `gate_up_proj` and `down_proj`) and computes the
    same function with the same arguments. The children are named `gate_up` and `down`, not `*_proj`: Transformers'
    checkpoint conversions rewrite names such as `experts.0.down_proj.weight*`.
    """

    def __init__(self, fused: nn.Module):
        gate_up, down = fused.gate_up_proj.data, fused.down_proj.data
        super().__init__(
            [
                Expert(_linear_from(gate_up[i]), _linear_from(down[i]), fused._apply_gate)
                for i in range(gate_up.shape[0])
            ]
        )
        # Kept for its class, activation and gating, out of sight of `named_parameters` and `state_dict`.
        self._fused = [fused.to_empty(device="meta")]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden_states)
        for index in top_k_index.unique().tolist():
            if index >= len(self):  # expert-parallel sentinel: the token belongs to another rank
                continue
            token_index, slot = torch.where(top_k_index == index)
            expert_output = self[index](hidden_states[token_index]) * top_k_weights[token_index, slot, None]
            output.index_add_(0, token_index, expert_output.to(output.dtype))
        return output

    def is_float(self) -> bool:
        return all(type(linear) is nn.Linear for expert in self for linear in (expert.gate_up, expert.down))

    def fuse(self) -> nn.Module:
        """Return the fused experts module again, with the weights that the float linears hold now."""
        first = self[0].gate_up.weight
        fused = self._fused[0].to_empty(device=first.device).to(first.dtype)
        with torch.no_grad():
            for i, expert in enumerate(self):
                fused.gate_up_proj[i].copy_(expert.gate_up.weight)
                fused.down_proj[i].copy_(expert.down.weight)
        return fused


def _linear_from(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return linear


def fused_experts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside `module` that own 3-D parameters: experts stored as stacks of matrices."""
    return {
        name: child
        for name, child in module.named_modules()
        if not isinstance(child, CONVOLUTIONS) and any(p.dim() == 3 for p in child.parameters(recurse=False))
    }


def why_not_sliceable(experts: nn.Module) -> str | None:
    """Return why a fused experts module cannot become `SlicedExperts`, or `None` if it can."""
    if {name for name, _ in experts.named_parameters(recurse=False)} != {"gate_up_proj", "down_proj"}:
        names = ", ".join(name for name, _ in experts.named_parameters(recurse=False))
        return f"its parameters are {names}, not gate_up_proj and down_proj"
    if not hasattr(experts, "_apply_gate"):
        return "it has no gating function"
    if experts.is_transposed or experts.has_post_expert_norm:
        return "its experts are stored transposed or normalised"
    return None
