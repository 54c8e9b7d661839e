"""Both views in one forward of the backbone, beside the fused outputs of TRL's language model head."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from trl.trainer.utils import FusedCausalLMOutput

from ..lm_head import LMHead, token_divergence
from .functional import attention_of_documents, attention_of_shared_prefix, documents_of


if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from .config import RopeDistillationConfig


# Arguments of the backbone that describe the attention of a padding-free row.
PACKED_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass
class TwoViewsOutput(FusedCausalLMOutput):
    """[`~trl.trainer.utils.FusedCausalLMOutput`] of the standard view, with the divergence of the perturbed one at
    each label of a suffix, 0 elsewhere, and which labels those are."""

    view_kl: Tensor | None = None
    view_mask: Tensor | None = None


class Arrangement:
    """How both views go through the backbone at once: what it is given, and where each view is in what it returns.

    Args:
        inputs (`dict`): of the backbone, of the standard view.
        perturbed_position_ids (`torch.Tensor`): `[batch, length]`.
        suffix (`torch.Tensor`): `[batch, length]`, where the perturbed view is wanted.
        shared_prefix (`bool`): compute only the suffixes twice.
        attention (`str`): the model's attention implementation.
        dtype (`torch.dtype`): the model's.
    """

    def __init__(
        self,
        inputs: dict[str, Any],
        perturbed_position_ids: Tensor,
        suffix: Tensor,
        *,
        shared_prefix: bool,
        attention: str,
        dtype: torch.dtype,
    ):
        self.batch, self.length = suffix.shape
        self.suffix, self.shared_prefix = suffix, shared_prefix
        self.in_one_row = "attention_mask" not in inputs and "flash" in attention
        position_ids, documents = documents_of(
            suffix.shape, inputs.get("position_ids"), inputs.get("attention_mask"), suffix.device
        )
        if shared_prefix:
            self.inputs = self._with_copies(inputs, position_ids, documents, perturbed_position_ids)
        elif self.in_one_row:
            self.inputs = self._in_one_row(inputs, position_ids, perturbed_position_ids)
        else:
            self.inputs = self._as_rows(inputs, position_ids, perturbed_position_ids)
            if "attention_mask" not in inputs:
                allowed = attention_of_documents(documents, position_ids)
                self.inputs["attention_mask"] = torch.cat([allowed, allowed])
        mask = self.inputs.get("attention_mask")
        if mask is not None and mask.ndim == 3:
            self.inputs["attention_mask"] = _as_4d(mask, attention, dtype)

    def _as_rows(self, inputs: dict[str, Any], position_ids: Tensor, perturbed: Tensor) -> dict[str, Any]:
        doubled = {name: torch.cat([inputs[name]] * 2) for name in ("input_ids", "attention_mask") if name in inputs}
        rest = {name: value for name, value in inputs.items() if name not in PACKED_ARGUMENTS}
        return {**rest, **doubled, "position_ids": torch.cat([position_ids, perturbed])}

    def _in_one_row(self, inputs: dict[str, Any], position_ids: Tensor, perturbed: Tensor) -> dict[str, Any]:
        """A padding-free row for flash attention: the documents' lengths come from its own arguments, never from the
        perturbed positions."""
        bounds = {
            name: torch.cat([inputs[name], inputs[name][1:] + inputs[name][-1]])
            for name in ("cu_seq_lens_q", "cu_seq_lens_k")
        }
        ids = torch.cat([inputs["input_ids"]] * 2, dim=1)
        return {**inputs, **bounds, "input_ids": ids, "position_ids": torch.cat([position_ids, perturbed], dim=1)}

    def _with_copies(
        self, inputs: dict[str, Any], position_ids: Tensor, documents: Tensor, perturbed: Tensor
    ) -> dict[str, Any]:
        # The tokens to copy come first in each row's order, then others, which fill up the shorter rows.
        self.copied = self.suffix.int().argsort(dim=1, descending=True, stable=True)[:, : self.suffix.sum(1).max()]

        def extended(values: Tensor, of_copies: Tensor) -> Tensor:
            return torch.cat([values, of_copies.gather(1, self.copied)], dim=1)

        is_copy = torch.arange(self.length + self.copied.shape[1], device=self.suffix.device) >= self.length
        # As seen from the copies the prefix is where it stands: what it was moved by is taken off.
        moved = perturbed - _of_first(perturbed, documents)
        attention_mask = attention_of_shared_prefix(
            extended(documents, documents.where(self.suffix, -1)),
            extended(position_ids, position_ids),
            extended(self.suffix, self.suffix),
            is_copy.expand(self.batch, -1),
        )
        rest = {name: value for name, value in inputs.items() if name not in PACKED_ARGUMENTS}
        return {
            **rest,
            "input_ids": extended(inputs["input_ids"], inputs["input_ids"]),
            "position_ids": extended(position_ids, moved),
            "attention_mask": attention_mask,
        }

    def standard(self, values: Tensor) -> Tensor:
        """The standard view in what the backbone returns, `[rows, length, ...]`: `[batch, length, ...]`."""
        return values[: self.batch, : self.length]

    def perturbed(self, values: Tensor) -> Tensor:
        """The perturbed view, `[batch, length, ...]`; with a shared prefix only its suffixes mean anything."""
        if self.shared_prefix:
            index = self.copied[..., None].expand(-1, -1, values.shape[-1])
            return torch.zeros_like(values[:, : self.length]).scatter(1, index, values[:, self.length :])
        return values[:, self.length :] if self.in_one_row else values[self.batch :]


def add_second_view(model: PreTrainedModel, args: RopeDistillationConfig) -> None:
    """Let `model(..., fused_lm_head=True, perturbed_position_ids=..., suffix=...)` return a [`TwoViewsOutput`].

    Both views are one forward of the model, as DDP and FSDP need it, and one of its backbone. Without
    `perturbed_position_ids` nothing changes.

    Args:
        model ([`~transformers.PreTrainedModel`]): has TRL's fused head; not wrapped by PEFT.
        args ([`RopeDistillationConfig`]): view mode, direction and temperature.
    """
    fused_forward = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self,
        *positional: Any,
        fused_lm_head: bool = False,
        perturbed_position_ids: Tensor | None = None,
        suffix: Tensor | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        if not fused_lm_head:
            return fused_forward(*positional, **kwargs)
        if perturbed_position_ids is None:
            return fused_forward(*positional, fused_lm_head=True, **kwargs)
        arrange = functools.partial(
            Arrangement,
            perturbed_position_ids=perturbed_position_ids,
            suffix=suffix,
            shared_prefix=args.psd_view_mode == "shared_prefix",
            attention=self.config._attn_implementation,
            dtype=self.dtype,
        )
        with _Splitting(self.base_model, arrange) as views:
            outputs = fused_forward(*positional, fused_lm_head=True, **kwargs)
        mask = outputs.label_mask & suffix[:, :-1].to(outputs.label_mask.device)
        standard, perturbed = (it[:, :-1].to(mask.device)[mask] for it in (views.standard, views.perturbed))
        head = LMHead.of(self)
        divergence = token_divergence(
            perturbed, head, standard, head, beta=float(args.psd_beta), temperature=args.psd_temperature
        )
        view_kl = divergence.new_zeros(mask.shape).masked_scatter(mask, divergence)
        return TwoViewsOutput(**outputs, view_kl=view_kl, view_mask=mask)

    model.forward = types.MethodType(forward, model)


class _Splitting:
    """While it is entered, a backbone runs on both views and returns the standard one; keeps the states of both."""

    standard: Tensor
    perturbed: Tensor

    def __init__(self, backbone: nn.Module, arrange: Any):
        self.backbone, self.arrange = backbone, arrange

    def __enter__(self) -> _Splitting:
        self.handles = [
            self.backbone.register_forward_pre_hook(self._join, with_kwargs=True),
            self.backbone.register_forward_hook(self._split),
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def _join(self, module: nn.Module, positional: tuple, inputs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        present = {name: value for name, value in inputs.items() if value is not None}
        self.arrangement = self.arrange(present)
        return positional, self.arrangement.inputs

    def _split(self, module: nn.Module, positional: tuple, outputs: ModelOutput) -> ModelOutput:
        states = outputs.last_hidden_state
        rows, length = states.shape[:2]
        self.standard, self.perturbed = self.arrangement.standard(states), self.arrangement.perturbed(states)
        outputs.last_hidden_state = self.standard
        if getattr(outputs, "router_logits", None) is not None:
            outputs.router_logits = tuple(
                self.arrangement.standard(it.view(rows, length, -1)).flatten(0, 1) for it in outputs.router_logits
            )
        return outputs


def _of_first(values: Tensor, documents: Tensor) -> Tensor:
    """The value of the first token of each token's document, in every row."""
    first = torch.zeros(int(documents.max()) + 2, dtype=values.dtype, device=values.device)
    starts = documents != documents.roll(1, 1)
    starts[:, 0] = True
    first[documents[starts]] = values[starts]
    return first[documents]


def _as_4d(allowed: Tensor, attention: str, dtype: torch.dtype) -> Tensor:
    """`[rows, length, length]` as the mask that an attention takes: booleans for sdpa, what is added for eager."""
    if attention == "sdpa":
        return allowed[:, None]
    return torch.zeros_like(allowed[:, None], dtype=dtype).masked_fill(~allowed[:, None], torch.finfo(dtype).min)
