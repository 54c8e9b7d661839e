"""SAFT on TRL's trainer of supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.utils import is_peft_model
from torch import Tensor, nn
from trl.trainer.utils import add_fused_lm_head

from ..sft import TokenLossTrainer
from .config import SAFTConfig
from .functional import token_losses
from .reference import add_reference_divergence, reference_for


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput


HISTOGRAM_BINS = 10


class SAFTTrainer(TokenLossTrainer):
    """[`~trl.SFTTrainer`] with SAFT's loss: each token's NLL, weighted between 1 (NLL) and its own probability (DFT).

    NLL pulls hardest on the tokens that the model finds least likely, noise among them; DFT hardly at all, and so
    never learns what is new. SAFT's weights lie between, by `saft_gamma` ("Navigating the Pareto Frontier of
    Alignment: Spectrum-Adaptive Fine-Tuning for LLMs", ICML 2026, https://icml.cc/virtual/2026/poster/65811). The
    weights are those of the authors' public code (confirmed); of the paper only the abstract was available, so this is
    not a reproduction of its results. Unlike their code, the loss is a sum over the number of labels in the whole
    step, so that accumulated batches give the gradient of one.

    All else is TRL's: datasets, masks, packing, PEFT, FSDP and DeepSpeed, evaluation, checkpoints, which are plain
    `save_pretrained` folders. The loss is a small number, as DFT's is, and may fall while the model gets worse:
    read `nll`, the plain loss, which is logged beside it with `saft/weight_mean`, `saft/weight_lt_0.1` (the share of
    tokens of a smaller weight), and, where `report_to` names a tracker, a histogram of the labels' probabilities as
    the shares `saft/probability/0.0` to `saft/probability/0.9`.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): what to train, or its name.
        args ([`SAFTConfig`], *optional*): without it, SAFT's defaults.
        kwargs: [`~trl.SFTTrainer`]'s, but for `compute_loss_func`.

    Raises:
        TypeError: `args` is of another class.
        ValueError: something would replace the loss or ignore the weights: `compute_loss_func`, sequence parallelism
            by DeepSpeed, a head without a plain weight.

    Example:

    ```python
    args = SAFTConfig("out", saft_scheme="geometric", saft_gamma=0.5)
    SAFTTrainer("HuggingFaceTB/SmolLM2-135M-Instruct", args, train_dataset=dataset).train()
    ```
    """

    _tag_names = ["trl", "saft"]
    _name = "SAFT"
    config_class = SAFTConfig

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        args: SAFTConfig | None = None,
        *positional: Any,
        **kwargs: Any,
    ):
        super().__init__(model, args, *positional, **kwargs)
        self._add_outputs()

    def _add_outputs(self) -> None:
        """Let the fused head return what the loss needs beside the log-probabilities."""
        model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        if self.args.saft_scheme == "deft":
            add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1", "log_sum_sq_probs"))
        if self.args.saft_scheme == "asft":
            if is_peft_model(self.model) and self.model.active_peft_config.is_prompt_learning:
                raise ValueError(
                    'saft_scheme="asft" compares with the model without its adapters, which '
                    f"{self.model.active_peft_config.peft_type} has not; use LoRA, or train the whole model."
                )
            reference = reference_for(self.model, self.accelerator, self.is_fsdp_enabled, self.is_deepspeed_enabled)
            add_reference_divergence(model, reference)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, ModelOutput]:
        """Return TRL's loss of a batch, with the log-probability of each label replaced by minus its SAFT loss."""

        def weighted(**kwargs: Any) -> ModelOutput:
            outputs = model(**kwargs)
            if getattr(outputs, "log_probs", None) is not None:
                losses, weights = self._token_losses(outputs)
                self._add_means(outputs.log_probs.detach(), weights, outputs.label_mask)
                outputs.log_probs = -losses
            return outputs

        return super().compute_loss(weighted, inputs, return_outputs, num_items_in_batch)

    def _token_losses(self, outputs: ModelOutput) -> tuple[Tensor, Tensor]:
        losses, weights = token_losses(
            outputs.log_probs,
            outputs.label_mask,
            self.args.saft_scheme,
            log_sum_sq_probs=outputs.log_sum_sq_probs,
            **self.args.loss_settings,
        )
        if self.args.saft_scheme == "asft":
            losses = losses + self.args.saft_kl_weight * outputs.reference_divergence
        return losses, weights

    def _add_means(self, log_probs: Tensor, weights: Tensor, mask: Tensor) -> None:
        means = {"nll": -log_probs, "saft/weight_mean": weights, "saft/weight_lt_0.1": weights < 0.1}
        if self.args.report_to:
            bins = (log_probs.exp() * HISTOGRAM_BINS).long().clamp(max=HISTOGRAM_BINS - 1)
            means |= {f"saft/probability/{it / HISTOGRAM_BINS}": bins == it for it in range(HISTOGRAM_BINS)}
        self.add_token_means(means, mask)
