"""The settings of SAFT."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import SFTConfig

from .functional import SCHEMES, check_settings


SETTINGS = ("gamma", "power", "alpha", "min_prob", "max_prob", "min_weight")


@dataclass
class SAFTConfig(SFTConfig):
    """[`~trl.SFTConfig`] with the loss of [`SAFTTrainer`]: supervised fine-tuning between NLL and DFT.

    A setting that the chosen loss has no use for is not looked at, so that `saft_scheme` alone changes the loss.

    Args:
        saft_scheme (`str`, *optional*, defaults to `"harmonic"`): SAFT's weights, confirmed by the authors' code but
            for the last: `"harmonic"`, their example; `"geometric"`, better where new facts are to be learned;
            `"linear"`; `"power"`, which holds all three and is ours. What others propose, to compare with:

            - `"nll"`: plain supervised fine-tuning, as [`~trl.SFTTrainer`] does it.
            - `"dft"`: the weight is the probability itself (https://huggingface.co/papers/2508.05629).
            - `"general"`: `(1 - p^alpha) / alpha` within two thresholds (https://huggingface.co/papers/2510.00526).
            - `"deft"`, `"deft_cayley"`: the same, the exponent from how sure the model is
              (https://huggingface.co/papers/2602.11424). The second depends on how a step is split into batches.
            - `"asft"`: DFT plus the divergence from the model as it was before the training, or without its adapters;
              costs a forward pass and, without adapters, a second copy of the model.
        saft_gamma (`float`, *optional*, defaults to 0.5): of SAFT's weights: 0 is NLL, 1 is DFT. Good range: 0.1 to
            0.9.
        saft_power (`float`, *optional*, defaults to 0.0): of `"power"`: the exponent of the mean, at most 1.
        saft_alpha (`float`, *optional*, defaults to 1.0): of `"general"`: 0 is NLL, 1 is `1 - p`, 10 looks at sure
            tokens only.
        saft_min_prob (`float`, *optional*, defaults to 0.0): of `"general"`: tokens less likely than this are dropped.
        saft_max_prob (`float`, *optional*, defaults to 1.0): of `"general"`: tokens more likely than this are dropped.
        saft_min_weight (`float`, *optional*, defaults to 1e-8): of SAFT's weights: the least one; the authors'.
        saft_kl_weight (`float`, *optional*, defaults to 0.1): of `"asft"`: of the divergence; the authors'.
        kwargs: [`~trl.SFTConfig`]'s. The learning rate wants its own search: the weights shrink the gradient, most of
            all those of `"dft"`.

    Raises:
        ValueError: a setting is outside of what is allowed, or one of TRL's would replace the loss.
    """

    saft_scheme: str = field(
        default="harmonic",
        metadata={
            "help": "Loss of each token: SAFT's weights harmonic, geometric, linear and power, or another to compare.",
            "choices": list(SCHEMES),
        },
    )
    saft_gamma: float = field(default=0.5, metadata={"help": "Of SAFT's weights: 0 is NLL, 1 is DFT."})
    saft_power: float = field(default=0.0, metadata={"help": "Exponent of the mean of scheme power, at most 1."})
    saft_alpha: float = field(default=1.0, metadata={"help": "Of scheme general: 0 is NLL, 1 is 1 - p."})
    saft_min_prob: float = field(default=0.0, metadata={"help": "Scheme general drops less likely tokens."})
    saft_max_prob: float = field(default=1.0, metadata={"help": "Scheme general drops more likely tokens."})
    saft_min_weight: float = field(default=1e-8, metadata={"help": "The least of SAFT's weights."})
    saft_kl_weight: float = field(default=0.1, metadata={"help": "Of the divergence in scheme asft."})

    def __post_init__(self):
        check_settings("saft_", scheme=self.saft_scheme, kl_weight=self.saft_kl_weight, **self.loss_settings)
        super().__post_init__()
        if self.loss_type != "nll":
            raise ValueError(
                f"loss_type={self.loss_type!r} would weigh the tokens twice; leave it at 'nll', and write "
                "saft_scheme='dft' for DFT."
            )
        if self.label_smoothing_factor > 0:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor!r} replaces the loss, so that no token would be "
                "weighted; leave it at 0."
            )

    @property
    def loss_settings(self) -> dict[str, float]:
        """The settings of [`saft_loss`] but for the scheme."""
        return {name: getattr(self, f"saft_{name}") for name in SETTINGS}
