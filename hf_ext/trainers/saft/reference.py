"""The divergence from a reference model, beside the fused outputs of TRL's language model head."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from trl.models.utils import _ForwardRedirection, prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import FusedCausalLMOutput, use_adapter

from ..lm_head import LMHead, token_divergence


if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


Reference = Callable[..., tuple[Tensor, LMHead]]


@dataclass
class AnchoredOutput(FusedCausalLMOutput):
    """[`~trl.trainer.utils.FusedCausalLMOutput`] with `KL(reference | model)` at each label, 0 where there is none."""

    reference_divergence: Tensor | None = None


def add_reference_divergence(model: PreTrainedModel, reference: Reference) -> None:
    """Make `model(..., fused_lm_head=True)` return an [`AnchoredOutput`]; inside its forward, as FSDP needs it.

    Args:
        model ([`~transformers.PreTrainedModel`]): has TRL's fused head; not wrapped by PEFT.
        reference (`Callable`): takes what the backbone took and returns its own last hidden states and its head.
    """
    fused_forward = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return fused_forward(*args, **kwargs)
        calls = []
        handle = self.base_model.register_forward_hook(
            lambda module, positional, named, output: calls.append((positional, named, output.last_hidden_state)),
            with_kwargs=True,
        )
        try:
            outputs = fused_forward(*args, fused_lm_head=True, **kwargs)
        finally:
            handle.remove()
        (positional, named, hidden_states) = calls[0]
        with torch.no_grad():
            reference_hidden_states, reference_head = reference(*positional, **named)
        mask = outputs.label_mask
        states, reference_states = (
            it[:, : mask.shape[1]].to(mask.device)[mask] for it in (hidden_states, reference_hidden_states)
        )
        divergence = token_divergence(states, LMHead.of(self), reference_states, reference_head, beta=0.0)
        divergence = divergence.new_zeros(mask.shape).masked_scatter(mask, divergence)
        return AnchoredOutput(**outputs, reference_divergence=divergence)

    model.forward = types.MethodType(forward, model)


def reference_for(model: nn.Module, accelerator: Accelerator, is_fsdp: bool, is_deepspeed: bool) -> Reference:
    """`model` as it is now: without its adapters, or else a frozen copy."""
    if is_peft_model(model):
        base_model = model.get_base_model()

        def without_adapters(*args: Any, **kwargs: Any) -> tuple[Tensor, LMHead]:
            with use_adapter(model, None):
                return base_model.base_model(*args, **kwargs).last_hidden_state, LMHead.of(base_model)

        return without_adapters

    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    if is_deepspeed:
        wrapped = prepare_deepspeed(frozen, accelerator)
    elif is_fsdp:
        wrapped = prepare_fsdp(frozen, accelerator)
    else:
        wrapped = accelerator.prepare_model(frozen, evaluation_mode=True)
    redirect = _ForwardRedirection()

    def frozen_copy(*args: Any, **kwargs: Any) -> tuple[Tensor, LMHead]:
        def states_and_head(*args: Any, **kwargs: Any) -> tuple[Tensor, LMHead]:
            return unwrapped.base_model(*args, **kwargs).last_hidden_state, LMHead.of(unwrapped)

        unwrapped = accelerator.unwrap_model(wrapped)
        return redirect(wrapped, unwrapped, states_and_head, *args, **kwargs)

    return frozen_copy
