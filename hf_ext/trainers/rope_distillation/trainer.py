"""RoPE-perturbed self-distillation on TRL's trainer of supervised fine-tuning."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn

from ..sft import TokenLossTrainer
from .config import RopeDistillationConfig
from .functional import Draw, documents_of, draw, perturbed_position_ids
from .rotary import check_attention, check_positions
from .views import add_second_view


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput


EVALUATION = 0  # counts as a step of its own: each document is perturbed alike in every evaluation


class RopeDistillationTrainer(TokenLossTrainer):
    """[`~trl.SFTTrainer`] whose loss also asks that predictions stay as they are when the positions are perturbed.

    A model adapted to long contexts gets worse or better with the place of the evidence. Here every batch is seen
    twice, under its own positions and under perturbed ones: the same tokens, the same attention, other rotary angles.
    The loss is that of supervised fine-tuning on the first view plus
    `psd_weight * KL(perturbed | standard)`, averaged over the labels of the suffix, whose distances to the prefix have
    changed; the standard view is the teacher and gets no gradient from it
    ("Shuffle the Context", https://huggingface.co/papers/2604.14339). Of the paper only the abstract and secondary
    accounts were available, and no code: this is an implementation of the idea and not a reproduction. Perturbation,
    direction and suffix follow those accounts; all ranges are ours.

    The draw of a document hangs on `seed`, the step and its tokens alone, so that a resumed run, and any number of
    processes, draw the same. The mean is over the suffixes of the whole step, as the labels' is. In evaluation
    `eval_loss` is the plain loss. `nll` and `view_kl` are logged throughout. What is saved is the plain model.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): a decoder-only model with rotary
            positions that do not depend on the length.
        args ([`RopeDistillationConfig`], *optional*): without it, its defaults.
        kwargs: [`~trl.SFTTrainer`]'s, but for `compute_loss_func`.

    Raises:
        TypeError: `args` is of another class.
        ValueError: the model has no rotary positions, or such that a long position changes all others (dynamic,
            longrope), or several for one token; its attention cannot take the views; prompt tuning; context or
            sequence parallelism.

    Example:

    ```python
    args = RopeDistillationConfig("out", psd_weight=1.0, max_length=4096)
    RopeDistillationTrainer("HuggingFaceTB/SmolLM2-135M", args, train_dataset=documents).train()
    ```
    """

    _tag_names = ["trl", "rope-distillation"]
    _name = "RoPE-PSD"
    _paper = {
        "title": "Shuffle the Context: RoPE-Perturbed Self-Distillation for Long-Context Adaptation",
        "id": "2604.14339",
    }
    config_class = RopeDistillationConfig

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        args: RopeDistillationConfig | None = None,
        *positional: Any,
        **kwargs: Any,
    ):
        if isinstance(model, nn.Module):
            check_positions(model.config)
        super().__init__(model, args, *positional, **kwargs)
        check_positions(self.model.config)
        packed = self.args.packing and self.args.packing_strategy != "wrapped" or self.args.padding_free
        check_attention(self.model.config, packed, self.args.psd_view_mode)
        self._check_wrapping()
        add_second_view(self.model.get_base_model() if is_peft_model(self.model) else self.model, self.args)

    def _check_wrapping(self) -> None:
        parallelism = self.accelerator.parallelism_config
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ValueError(
                "Context and sequence parallelism split a row over processes, but both views of a row must lie "
                "together; train without."
            )
        if is_peft_model(self.model) and self.model.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"{self.model.active_peft_config.peft_type} puts virtual tokens in front, which have no positions to "
                "perturb; use LoRA, or train the whole model."
            )
        noisy = [
            name for name, module in self.model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0
        ]
        if noisy:
            warnings.warn(
                f"Dropout in {noisy[0]} and {len(noisy) - 1} more modules makes both views differ by itself, which "
                "the divergence then counts: set it to 0.",
                stacklevel=3,
            )

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Return the batches of a step with their perturbed positions, and the number of their labels."""
        batches, num_items_in_batch = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.args.psd_weight == 0:
            return batches, num_items_in_batch
        for batch in batches:
            batch.update(self._perturb(batch, self.state.global_step + 1))
        counts = [(batch["suffix"][:, :-1] & (batch["labels"][:, 1:] != -100)).sum() for batch in batches]
        if counts:
            num_view_items = torch.stack(counts).sum().to(device)
            if self.args.average_tokens_across_devices:
                num_view_items = self.accelerator.reduce(num_view_items)
            for batch in batches:
                batch["num_view_items"] = num_view_items
        return batches, num_items_in_batch

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, ModelOutput]:
        """Return TRL's loss of a batch, in training plus the divergence of its perturbed view."""
        training = self.model.training
        if "suffix" not in inputs and not (training and self.args.psd_weight == 0):
            inputs = {**inputs, **self._perturb(inputs, EVALUATION)}
        num_view_items = inputs.get("num_view_items")
        inputs = {name: value for name, value in inputs.items() if name != "num_view_items"}
        seen = []

        def two_views(**kwargs: Any) -> ModelOutput:
            seen.append(model(**kwargs))
            return seen[-1]

        result = super().compute_loss(two_views, inputs, return_outputs, num_items_in_batch)
        loss, *rest = result if return_outputs else (result,)
        outputs = seen[0]
        self.add_token_means({"nll": -outputs.log_probs}, outputs.label_mask)
        if getattr(outputs, "view_kl", None) is not None:
            self.add_token_means({"view_kl": outputs.view_kl}, outputs.view_mask)
            if training:
                loss = loss + self.args.psd_weight * self._view_loss(outputs, num_view_items)
        return (loss, *rest) if return_outputs else loss

    def _view_loss(self, outputs: ModelOutput, num_view_items: Tensor | None) -> Tensor:
        """The mean over the labels in the suffixes of the step, scaled as TRL scales the mean over all labels."""
        if num_view_items is None:
            return outputs.view_kl.sum() / outputs.view_mask.sum().clamp(min=1)
        mean = outputs.view_kl.sum() / num_view_items.to(outputs.view_kl.device).clamp(min=1)
        if self.args.average_tokens_across_devices:
            mean = mean * (self.accelerator.num_processes // self.get_tp_size())
        return mean

    def _perturb(self, inputs: dict[str, Any], step: int) -> dict[str, Tensor]:
        """Draw the perturbation of each document of a batch."""
        input_ids = inputs["input_ids"]
        position_ids, documents = documents_of(
            input_ids.shape, inputs.get("position_ids"), inputs.get("attention_mask"), input_ids.device
        )
        rows, index = input_ids.cpu().flatten(), documents.cpu().flatten()
        draws = [self._draw(rows[index == it], step) for it in range(int(index.max()) + 1)]
        perturbed, suffix = perturbed_position_ids(position_ids, documents, draws, self.args.psd_perturbation)
        return {"perturbed_position_ids": perturbed, "suffix": suffix}

    def _draw(self, tokens: Tensor, step: int) -> Draw:
        key = f"{self.args.seed} {step} {tokens.tolist()}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
        return draw(
            len(tokens),
            self.args.psd_perturbation,
            torch.Generator().manual_seed(seed),
            min_split=self.args.psd_min_split,
            max_split=self.args.psd_max_split,
            max_skip_ratio=self.args.psd_max_skip_ratio,
            max_position=self.args.psd_max_position,
        )
