"""The settings of RoPE-perturbed self-distillation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trl import SFTConfig

from .functional import PERTURBATIONS, WITH_SHARED_PREFIX


VIEW_MODES = ("concat", "shared_prefix")
RANGES = {
    "psd_weight": (0.0, math.inf),
    "psd_min_split": (0.0, 1.0),
    "psd_max_split": (0.0, 1.0),
    "psd_max_skip_ratio": (0.0, math.inf),
    "psd_temperature": (0.0, math.inf),
}


@dataclass
class RopeDistillationConfig(SFTConfig):
    """[`~trl.SFTConfig`] with the second term of [`RopeDistillationTrainer`]'s loss.

    The paper's ranges, weight and temperature are not public: the defaults are ours.

    Args:
        psd_weight (`float`, *optional*, defaults to 1.0): of the divergence, lambda in the paper, which calls it
            sensitive. 0 is plain supervised fine-tuning. Good range: 0.1 to 2.
        psd_perturbation (`str`, *optional*, defaults to `"suffix_skip"`): `"suffix_skip"` moves all tokens from a
            split on further away; `"cyclic_shift"` moves them in front, a far stronger change. `"chunk_permutation"`
            and `"nope"` are the paper's ablations, which make models worse, for experiments.
        psd_min_split (`float`, *optional*, defaults to 0.1), psd_max_split (`float`, *optional*, defaults to 0.9):
            bounds of the split, as shares of a document's length.
        psd_max_skip_ratio (`float`, *optional*, defaults to 0.5): the largest skip, as a share of a document's length.
            Good range: 0.25 to 4.
        psd_max_position (`int`, *optional*): no position reaches this; without it positions go beyond the longest
            document by its largest skip.
        psd_beta (`float`, *optional*, defaults to 1.0): 1 for the paper's reverse divergence, of the perturbed view
            from the standard one; 0 for the forward one.
        psd_temperature (`float`, *optional*, defaults to 1.0): the logits of both views are divided by it.
        psd_view_mode (`str`, *optional*, defaults to `"concat"`): `"concat"` runs both views as two rows;
            `"shared_prefix"` (ours) computes what they have in common once, to the same result, with a mask of
            `[length, length]` a row: faster below some 16k tokens; needs sdpa or eager attention without a sliding
            window.
        kwargs: [`~trl.SFTConfig`]'s.

    Raises:
        ValueError: a setting is outside of what is allowed, or one of TRL's would replace the loss.
    """

    psd_weight: float = field(default=1.0, metadata={"help": "Weight of the divergence between the views; 0 is SFT."})
    psd_perturbation: str = field(
        default="suffix_skip", metadata={"help": "How positions are perturbed.", "choices": list(PERTURBATIONS)}
    )
    psd_min_split: float = field(default=0.1, metadata={"help": "Least split, as a share of a document."})
    psd_max_split: float = field(default=0.9, metadata={"help": "Largest split, as a share of a document."})
    psd_max_skip_ratio: float = field(default=0.5, metadata={"help": "Largest skip, as a share of a document."})
    psd_max_position: int | None = field(default=None, metadata={"help": "No position reaches this."})
    psd_beta: float = field(default=1.0, metadata={"help": "1 for the reverse divergence, 0 for the forward one."})
    psd_temperature: float = field(default=1.0, metadata={"help": "The logits of both views are divided by it."})
    psd_view_mode: str = field(
        default="concat", metadata={"help": "How both views are computed.", "choices": list(VIEW_MODES)}
    )

    def __post_init__(self):
        self._check()
        super().__post_init__()
        if self.loss_type != "nll":
            raise ValueError(f"loss_type={self.loss_type!r} is not supported beside the divergence; use 'nll'.")
        if self.label_smoothing_factor > 0:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor!r} needs all logits, which are never there; "
                "leave it at 0."
            )

    def _check(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name}={value!r} is a {type(value).__name__}; pass a number.")
            if not (low <= value <= high and math.isfinite(value)) or (name == "psd_temperature" and value == 0):
                raise ValueError(f"{name}={value!r} is outside of its range, {low:g} to {high:g}.")
        if self.psd_min_split > self.psd_max_split:
            raise ValueError(f"psd_min_split={self.psd_min_split!r} is above psd_max_split={self.psd_max_split!r}.")
        if self.psd_beta not in (0, 1):
            raise ValueError(
                f"psd_beta={self.psd_beta!r}: take 1 for the reverse divergence or 0 for the forward one."
            )
        for name, allowed in (("psd_perturbation", PERTURBATIONS), ("psd_view_mode", VIEW_MODES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; allowed: {', '.join(allowed)}.")
        if self.psd_max_position is not None and (
            not isinstance(self.psd_max_position, int) or self.psd_max_position < 2
        ):
            raise ValueError(f"psd_max_position={self.psd_max_position!r}; give an integer from 2 on, or None.")
        if self.psd_view_mode == "shared_prefix" and self.psd_perturbation not in WITH_SHARED_PREFIX:
            raise ValueError(
                f"psd_perturbation={self.psd_perturbation!r} leaves no prefix as it is; use psd_view_mode='concat'."
            )
