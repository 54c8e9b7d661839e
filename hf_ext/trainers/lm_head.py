"""The head of a causal language model, for losses that project hidden states in tiles and never hold all logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction


if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class LMHead:
    """What turns hidden states into logits: `softcap(logit_scale * (hidden_states @ weight.T + bias))`.

    Args:
        weight (`torch.Tensor`): `[vocabulary, hidden]`.
        bias (`torch.Tensor`, *optional*): `[vocabulary]`.
        logit_scale (`float`): a factor on the logits.
        softcap (`float`, *optional*): `softcap * tanh(logits / softcap)` follows where it is given.
    """

    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    softcap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> LMHead:
        """The head of `model` as it is now; whole, where FSDP has split it. Call it inside the model's forward."""
        head = model.get_output_embeddings()
        weight, bias = (it.full_tensor() if isinstance(it, DTensor) else it for it in (head.weight, head.bias))
        config = model.config.get_text_config()
        return cls(weight, bias, logit_scale(config), getattr(config, "final_logit_softcapping", None))


def logit_scale(config: PretrainedConfig) -> float:
    """The factor on the logits that a text config names, under one of the names in use; 1 if none."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale = getattr(config, name, None)
        if scale is not None:
            return scale
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return scaling if config.model_type == "hyperclovax" else 1 / scaling


def token_divergence(
    student_hidden_states: Tensor,
    student: LMHead,
    teacher_hidden_states: Tensor,
    teacher: LMHead,
    *,
    beta: float,
    temperature: float = 1.0,
) -> Tensor:
    """Divergence between both predictions at each position, in nats; the gradient flows to the student alone.

    Args:
        student_hidden_states (`torch.Tensor`), teacher_hidden_states (`torch.Tensor`): `[tokens, hidden]`.
        student ([`LMHead`]), teacher ([`LMHead`]): of one vocabulary.
        beta (`float`): 0 for the forward `KL(teacher | student)`, 1 for the reverse, between them the Jensen-Shannon
            divergence, as TRL's `DistillationTrainer` has it.
        temperature (`float`, *optional*, defaults to 1.0): the logits of both are divided by it.

    Returns:
        `torch.Tensor`: float32, `[tokens]`.
    """
    divergence, _ = ChunkedDivergenceFunction.apply(
        student_hidden_states,
        student.weight,
        student.bias,
        teacher_hidden_states.detach(),
        teacher.weight.detach(),
        None if teacher.bias is None else teacher.bias.detach(),
        beta,
        temperature,
        student.logit_scale,
        student.softcap,
        teacher.logit_scale,
        teacher.softcap,
    )
    return divergence


def check_lm_head(model: PreTrainedModel) -> None:
    """Refuse a head whose weight cannot be multiplied by as it is.

    Raises:
        ValueError: `model` has no head, or one of packed or missing weights.
    """
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.ndim != 2:
        found = "none" if head is None else f"a {type(head).__name__} without a plain float weight"
        raise ValueError(
            f"The loss multiplies by the weight of the language model head, but {type(model).__name__} has {found}. "
            "Load a causal language model, and keep its head out of the quantization (modules_to_not_convert)."
        )
