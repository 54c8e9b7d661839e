"""SAFT's weights and the losses beside it, on the log-probabilities of the labels.

"Navigating the Pareto Frontier of Alignment: Spectrum-Adaptive Fine-Tuning for LLMs" (ICML 2026,
https://icml.cc/virtual/2026/poster/65811). Of the paper only the abstract was available; its weights are those of the
authors' public code. Symbols: `p` probability of a label, `w` the weight of its token, gamma 0 is NLL, gamma 1 is DFT.

Every loss here pulls on the model like the NLL with each token weighted: `dloss/dlog p = -w`.
"""

import math
from typing import Any

import torch


# The exponent of the power mean of `p` and 1 that each of SAFT's weights is.
MEANS = {"harmonic": -1.0, "geometric": 0.0, "linear": 1.0}
WEIGHTS = (*MEANS, "power")
SCHEMES = (*WEIGHTS, "nll", "dft", "general", "deft", "deft_cayley", "asft")
NEAR_GEOMETRIC = 0.1
DEFT_EPSILON = 1e-6
CAYLEY_EPSILON, CAYLEY_FLOOR, CAYLEY_MINIMUM = 1e-8, 0.5, 1e-3


def saft_weight(
    log_probs: torch.Tensor,
    scheme: str = "harmonic",
    gamma: float = 0.5,
    *,
    power: float = 0.0,
    min_weight: float = 1e-8,
) -> torch.Tensor:
    """Weight of each token: a mean of the probability of its label, weighing `gamma`, and 1.

    `harmonic` `p / (gamma + (1 - gamma) p)`, `geometric` `p^gamma` and `linear` `gamma p + (1 - gamma)` are confirmed
    by the authors' code; `power`, `(gamma p^r + 1 - gamma)^(1/r)`, which holds all three, is ours. As `p` goes to 0,
    `linear` keeps `1 - gamma`, `geometric` falls as `p^gamma` and `harmonic` as `p / gamma`, which at `gamma=0.5` is
    just twice DFT's: where new facts are to be learned take `geometric`.

    Args:
        log_probs (`torch.Tensor`): log-probability of each label, natural logarithm, any shape; at most 0.
        scheme (`str`, *optional*, defaults to `"harmonic"`): `"harmonic"`, `"geometric"`, `"linear"` or `"power"`.
        gamma (`float`, *optional*, defaults to 0.5): from 0, all weights 1, to 1, all weights `p`.
        power (`float`, *optional*, defaults to 0.0): r of `"power"`, at most 1; -1, 0 and 1 are the other schemes.
        min_weight (`float`, *optional*, defaults to 1e-8): the least weight; the authors'.

    Returns:
        `torch.Tensor`: float32 or better, of the shape of `log_probs`, without gradient, between `min_weight` and 1.

    Raises:
        ValueError: a setting is outside of what is allowed.

    Example:

    ```python
    log_probs = -F.cross_entropy(logits, labels, reduction="none")
    loss = -(saft_weight(log_probs, "geometric") * log_probs).mean()
    ```
    """
    if scheme not in WEIGHTS:
        raise ValueError(f"scheme={scheme!r} is none of the weights {', '.join(WEIGHTS)}; the others are losses.")
    check_settings(gamma=gamma, power=power, min_weight=min_weight)
    return _mean_weight(_full(log_probs), MEANS.get(scheme, power), gamma, min_weight)


def saft_loss(
    outputs: Any,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
    *,
    scheme: str = "harmonic",
    gamma: float = 0.5,
    power: float = 0.0,
    alpha: float = 1.0,
    min_prob: float = 0.0,
    max_prob: float = 1.0,
    min_weight: float = 1e-8,
) -> torch.Tensor:
    """SAFT's loss, or one of its siblings, for [`~transformers.Trainer`] and for loops of one's own.

    The sum of the tokens' losses over the number of labels, as Transformers counts them. It needs all logits; in
    [`SAFTTrainer`] the same loss does not.

    Args:
        outputs (`ModelOutput` or `torch.Tensor`): what the model returned, or its logits, `[..., length, vocabulary]`.
        labels (`torch.Tensor`): token ids, `[..., length]`, not shifted; -100 where no loss is wanted.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): labels of all batches that make up one step, from the
            trainer. Without it the loss is a mean over the labels at hand.
        scheme (`str`, *optional*, defaults to `"harmonic"`): see [`SAFTConfig`]; all but `"asft"`, whose reference
            model only the trainer has.
        gamma (`float`), power (`float`), alpha (`float`), min_prob (`float`), max_prob (`float`), min_weight
            (`float`), *optional*: see [`SAFTConfig`].

    Returns:
        `torch.Tensor`: a scalar, in float32 or better; a zero that has a gradient where no label is left.

    Raises:
        ValueError: a setting is outside of what is allowed, or logits and labels differ in length.

    Example:

    ```python
    trainer = Trainer(model, arguments, compute_loss_func=partial(saft_loss, scheme="geometric"), ...)
    ```
    """
    if scheme == "asft":
        raise ValueError('scheme="asft" needs a reference model: use SAFTTrainer with SAFTConfig(saft_scheme="asft").')
    settings = {"gamma": gamma, "power": power, "alpha": alpha, "min_prob": min_prob, "max_prob": max_prob}
    settings["min_weight"] = min_weight
    check_settings(scheme=scheme, **settings)
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs["logits"]
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits have the shape {tuple(logits.shape)} and labels {tuple(labels.shape)}; labels must have all but "
            "the last dimension of the logits: pass them as they went into the model, not shifted."
        )
    labels = labels[..., 1:].to(logits.device)
    all_log_probs = _full(logits[..., :-1, :]).log_softmax(-1)
    label_mask = labels != -100
    log_probs = all_log_probs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1).masked_fill(~label_mask, 0.0)
    log_sum_sq_probs = (2 * all_log_probs.detach()).logsumexp(-1) if scheme == "deft" else None
    losses, _ = token_losses(log_probs, label_mask, scheme, log_sum_sq_probs=log_sum_sq_probs, **settings)
    count = label_mask.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
    return losses.sum() / count.to(losses.device).clamp(min=1)


def token_losses(
    log_probs: torch.Tensor,
    label_mask: torch.Tensor,
    scheme: str,
    *,
    gamma: float,
    power: float,
    alpha: float,
    min_prob: float,
    max_prob: float,
    min_weight: float,
    log_sum_sq_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and weight of each token; a loss of 0 where `label_mask` is false.

    Args:
        log_probs (`torch.Tensor`): of the labels, float32 or better; 0 where `label_mask` is false.
        label_mask (`torch.Tensor`): of the same shape, whether there is a label.
        scheme (`str`): one of `SCHEMES`. `"asft"` is DFT here: the divergence that it adds is the caller's.
        gamma (`float`), power (`float`), min_weight (`float`): of [`saft_weight`].
        alpha (`float`), min_prob (`float`), max_prob (`float`): of `"general"`: `(1 - p^alpha) / alpha` where `p` lies
            between both bounds, else 0 (https://huggingface.co/papers/2510.00526; confirmed by the authors' code,
            whose mean however leaves the dropped tokens out).
        log_sum_sq_probs (`torch.Tensor`, *optional*): log of the sum of all squared probabilities; for `"deft"`.

    Returns:
        The losses, and `w` without gradient.
    """
    if scheme == "general":
        kept = _within(log_probs, min_prob, max_prob) & label_mask
        losses, weights = _power_loss(log_probs, alpha)
        return losses * kept, weights * kept
    if scheme == "deft":
        # https://huggingface.co/papers/2602.11424; confirmed by the authors' code
        alphas = log_sum_sq_probs.exp()
        losses, weights = _power_loss(log_probs, alphas)
        share = alphas / (alphas + DEFT_EPSILON)
        return losses * share, weights * share
    if scheme == "deft_cayley":
        return _power_loss(log_probs, cayley_exponent(log_probs.detach().exp(), label_mask))
    if scheme in ("dft", "asft"):
        weights = log_probs.detach().exp()
    elif scheme == "nll":
        weights = torch.ones_like(log_probs)
    else:
        weights = _mean_weight(log_probs, MEANS.get(scheme, power), gamma, min_weight)
    return -weights * log_probs, weights


def cayley_exponent(probs: torch.Tensor, label_mask: torch.Tensor) -> torch.Tensor:
    """DEFT's exponent from the distance `d = 1 - p`: `floor + (1 - floor) (1 - d) / (1 + d)`, the floor half the mean
    of `p` over the labels of the batch, so that it depends on how a step is split into batches (confirmed by the
    authors' code; https://huggingface.co/papers/2602.11424).

    Args:
        probs (`torch.Tensor`): `p`, any shape, without gradient.
        label_mask (`torch.Tensor`): of the same shape, whether there is a label.

    Returns:
        `torch.Tensor`: between 0.001 and 1.
    """
    floor = CAYLEY_FLOOR * (probs * label_mask).sum() / label_mask.sum().clamp(min=1)
    distance = 1 - probs + CAYLEY_EPSILON
    return (floor + (1 - floor) * (1 - distance) / (1 + distance)).clamp(CAYLEY_MINIMUM, 1.0)


def check_settings(prefix: str = "", **settings: Any) -> None:
    """Raise a `ValueError` that names the first of `settings` outside of what is allowed, `prefix` before its name."""
    scheme = settings.pop("scheme", None)
    if scheme is not None and scheme not in SCHEMES:
        raise ValueError(f"{prefix}scheme={scheme!r} is unknown; allowed: {', '.join(SCHEMES)}.")
    ranges = {
        "gamma": (0.0, 1.0),
        "power": (-math.inf, 1.0),
        "alpha": (0.0, math.inf),
        "min_prob": (0.0, 1.0),
        "max_prob": (0.0, 1.0),
        "min_weight": (0.0, 1.0),
        "kl_weight": (0.0, math.inf),
    }
    for name, value in settings.items():
        low, high = ranges[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{prefix}{name}={value!r} is a {type(value).__name__}; pass a number.")
        if not (low <= value <= high and math.isfinite(value)):
            raise ValueError(f"{prefix}{name}={value!r} is outside of its range, {low:g} to {high:g}, both finite.")
    if settings.get("min_prob", 0.0) > settings.get("max_prob", 1.0):
        raise ValueError(
            f"{prefix}min_prob={settings['min_prob']!r} is above {prefix}max_prob={settings['max_prob']!r}: no token "
            "would be left to learn from."
        )


def _mean_weight(log_probs: torch.Tensor, power: float, gamma: float, min_weight: float) -> torch.Tensor:
    """`(gamma p^r + 1 - gamma)^(1/r)` from `log p`: the quotient itself is 0/0 at gamma 0 once `p` underflows."""
    log_probs = log_probs.detach()
    if power == 0:
        return (gamma * log_probs).exp().clamp(min_weight, 1.0)
    scaled = power * log_probs
    shares = torch.tensor([gamma, 1 - gamma], dtype=scaled.dtype, device=scaled.device)
    log_gamma, log_rest = shares.log()
    log_mean = torch.logaddexp(log_gamma + scaled, log_rest)
    if abs(power) < NEAR_GEOMETRIC:
        # The mean is close to 1, and its logarithm is divided by a small r.
        close = torch.log1p(gamma * torch.expm1(scaled))
        log_mean = torch.where(close.abs() < 0.5, close, log_mean)
    return (log_mean / power).exp().clamp(min_weight, 1.0)


def _power_loss(log_probs: torch.Tensor, alpha: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(1 - p^alpha) / alpha`, which is `-log p` at 0, and its weight `p^alpha`."""
    exponents = alpha * log_probs.detach()
    weights = exponents.exp()
    is_log = isinstance(alpha, int | float) and alpha == 0
    values = -log_probs.detach() if is_log else -torch.expm1(exponents) / alpha
    # Autograd would take p^alpha as expm1 + 1, which is 0 for rare tokens.
    return values - weights * (log_probs - log_probs.detach()), weights


def _within(log_probs: torch.Tensor, min_prob: float, max_prob: float) -> torch.Tensor:
    probs = log_probs.detach().exp()
    return (probs >= min_prob) & (probs <= max_prob)


def _full(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
