"""Distillation of a LittleBit-2 model from its float original."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainerCallback

from .functional import distillation_loss
from .layer import LatentBinaryLinear


if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput


class LittleBit2Trainer(Trainer):
    """[`~transformers.Trainer`] with LittleBit's loss: the divergence from the teacher's predictions, summed over the
    tokens of a row, plus `hidden_loss_weight` times the mean squared error of every block's output
    (https://huggingface.co/papers/2506.13771, section 4; confirmed by the authors' code).

    There is no loss on labels. Padding, by `attention_mask`, counts nowhere. Accumulated gradients and an evaluation's
    `eval_loss` are means over rows. The authors train 5 epochs on rows of 2048 tokens: AdamW at 4e-5, no weight decay,
    cosine with 2% of warm-up.

    Args:
        model ([`~transformers.PreTrainedModel`]): quantized with `LittleBit2Config(trainable=True)`.
        teacher_model ([`~transformers.PreTrainedModel`]): the float model it was made from; frozen here.
        hidden_loss_weight (`float`, defaults to 10.0): the authors', for Llama and its like. Where a few activations
            are huge, as at the first token of SmolLM2, they are all that the second term sees, and it drowns the
            first: take 0 to 1e-3. 0 leaves it out, and the memory it takes.
        kwargs: [`~transformers.Trainer`]'s; rows need `input_ids` and, if padded, `attention_mask`. Without a
            `data_collator` or `processing_class` rows of unequal length are padded.

    Raises:
        ValueError: `model` has nothing to train, or `teacher_model` is of another shape.

    Example:

    ```python
    trainer = LittleBit2Trainer(model=model, teacher_model=teacher, args=TrainingArguments("out"), train_dataset=rows)
    trainer.train()
    pack(trainer.model).save_pretrained("smollm2-littlebit2")
    ```
    """

    # A mean over the rows of a batch: the Trainer divides it by the number of accumulated batches.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model: PreTrainedModel,
        *args: Any,
        teacher_model: PreTrainedModel,
        hidden_loss_weight: float = 10.0,
        **kwargs: Any,
    ):
        _check(model, teacher_model)
        if len(args) < 2 and kwargs.get("processing_class") is None:
            kwargs.setdefault("data_collator", pad_rows)
        super().__init__(model, *args, **kwargs)
        self.add_callback(_MarkTrained)
        self.hidden_loss_weight = hidden_loss_weight
        teacher_model = teacher_model.eval().requires_grad_(False)
        self.teacher_model = self.accelerator.prepare_model(teacher_model, evaluation_mode=True)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, ModelOutput]:
        """Return the distillation loss of a batch, a mean over its rows whatever `num_items_in_batch` is."""
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        options = {"output_hidden_states": self.hidden_loss_weight != 0, "use_cache": False}
        outputs = model(**inputs, **options)
        with torch.no_grad():
            teacher = self.teacher_model(**inputs, **options)
        loss = distillation_loss(
            outputs.logits,
            teacher.logits,
            (outputs.hidden_states or ())[1:],
            (teacher.hidden_states or ())[1:],
            inputs.get("attention_mask"),
            self.hidden_loss_weight,
        )
        outputs.hidden_states = None
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the loss, with or without labels, and for `compute_metrics` the logits and labels."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        if prediction_loss_only:
            return loss.detach(), None, None
        return loss.detach(), outputs.logits.detach(), inputs.get("labels")


class _MarkTrained(TrainerCallback):
    """Lets checkpoints say that their model is no longer the mere start."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if getattr(model, "hf_quantizer", None) is not None:
            model.hf_quantizer.quantization_config.trained = True


def pad_rows(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Stack rows of `input_ids`; where they differ in length, pad them and add an `attention_mask`."""
    names = [name for name in ("input_ids", "attention_mask", "labels") if name in rows[0]]
    columns = {name: [torch.as_tensor(row[name]) for row in rows] for name in names}
    if len({len(ids) for ids in columns["input_ids"]}) > 1:
        columns.setdefault("attention_mask", [torch.ones_like(ids) for ids in columns["input_ids"]])
    fill = {"labels": -100}
    return {name: pad_sequence(column, True, fill.get(name, 0)) for name, column in columns.items()}


def _check(model: PreTrainedModel, teacher_model: PreTrainedModel) -> None:
    for name, given in (("model", model), ("teacher_model", teacher_model)):
        if not isinstance(given, nn.Module):
            raise TypeError(f"{name}={given!r} is a {type(given).__name__}; pass a loaded model.")
    if not any(isinstance(module, LatentBinaryLinear) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has no trainable LittleBit-2 layers: quantize the float model with "
            "LittleBit2Config(trainable=True). A packed model does not train further, but adapters do on top of it."
        )
    if teacher_model is model or getattr(teacher_model, "hf_quantizer", None) is not None:
        raise ValueError(
            "teacher_model is quantized, or the model itself: `quantize` changes a model in place. Load the float "
            "model once more for the teacher."
        )
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        own, other = (getattr(m.config.get_text_config(decoder=True), name) for m in (model, teacher_model))
        if own != other:
            raise ValueError(
                f"teacher_model has {name}={other}, but the model has {own}; the teacher must be the float model that "
                "was quantized."
            )
