"""What all trainers with a loss of their own on TRL's supervised fine-tuning share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from trl import SFTConfig, SFTTrainer

from .lm_head import check_lm_head


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class TokenLossTrainer(SFTTrainer):
    """[`~trl.SFTTrainer`] that refuses what would replace its loss, and logs means over all tokens since the last log.

    TRL's own entries are means of the batches' means; these are exact over accumulated batches and processes.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): what to train, or its name.
        args (`config_class`, *optional*): without it, its defaults.
        positional, kwargs: [`~trl.SFTTrainer`]'s, but for `compute_loss_func`.

    Raises:
        TypeError: `args` is of another class.
        ValueError: `compute_loss_func`, sequence parallelism by DeepSpeed, or a head without a plain weight.
    """

    config_class: ClassVar[type[SFTConfig]]

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        args: SFTConfig | None = None,
        *positional: Any,
        **kwargs: Any,
    ):
        name, config_name = type(self).__name__, self.config_class.__name__
        if args is None:
            model_name = model if isinstance(model, str) else model.config._name_or_path
            args = self.config_class(f"{model_name.split('/')[-1]}-{self._name}")
        if not isinstance(args, self.config_class):
            raise TypeError(f"args is a {type(args).__name__}; pass a {config_name}, which takes the same and more.")
        given = inspect.signature(SFTTrainer.__init__).bind_partial(self, model, args, *positional, **kwargs).arguments
        if given.get("compute_loss_func") is not None:
            raise ValueError(f"compute_loss_func would replace the loss of {name}; leave it out, or use SFTTrainer.")
        super().__init__(model, args, *positional, **kwargs)
        parallelism = self.accelerator.parallelism_config
        if parallelism is not None and parallelism.sp_enabled and parallelism.sp_backend == "deepspeed":
            raise ValueError(
                f"sp_size={parallelism.sp_size} with DeepSpeed takes the model's own loss in place of that of {name}; "
                "train without sequence parallelism, or use SFTTrainer."
            )
        check_lm_head(self.model)
        self._token_sums: dict[str, dict[str, Tensor]] = {"train": {}, "eval": {}}

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def add_token_means(self, values: Mapping[str, Tensor], mask: Tensor) -> None:
        """Add the tokens of all processes where `mask` is true; nothing leaves the device before the next log.

        Args:
            values (`Mapping[str, torch.Tensor]`): by the name in the logs, each of the shape of `mask`.
            mask (`torch.Tensor`): which tokens count.
        """
        sums = torch.stack([(value.detach() * mask).sum(dtype=torch.float32) for value in (mask, *values.values())])
        count, *totals = self.accelerator.reduce(sums)
        known = self._token_sums[self._mode]
        for name, total in zip(values, totals, strict=True):
            known[name] = known.get(name, 0) + torch.stack([total, count])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the means beside what TRL logs."""
        for name, sums in self._token_sums[self._mode].items():
            total, count = sums.tolist()
            self._metrics[self._mode][name] = [total / max(count, 1.0)]
        self._token_sums[self._mode].clear()
        super().log(logs, start_time)
