"""The equations of LittleBit-2 (https://huggingface.co/papers/2603.00042) and of LittleBit
(https://huggingface.co/papers/2506.13771), on which it builds, on plain tensors.

Of the first paper only the abstract was available; its method, and what of the second was not quoted elsewhere, follow
the authors' public code (confirmed there unless marked as ours). Symbols: `W` weight `[b, a]` (out, in); `r` rank;
`U` `[b, r]` and `V` `[r, a]` factors, whose signs are stored; scales `u1` `[b]` (h), `u2` and `v1` `[r]` (l = u2 v1),
`v2` `[a]` (g). A path is `diag(u1) sign(U) diag(u2 v1) sign(V) diag(v2)`, a layer the sum of its paths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


# Up to this many rows or columns the SVD is exact: it gives a lower error, and costs seconds.
EXACT_SVD_LIMIT = 2048
SVD_OVERSAMPLING, SVD_ITERATIONS = 16, 4


@dataclass(frozen=True)
class BinaryPath:
    """One pair of factors with its scales: `diag(u1) sign(U) diag(u2 v1) sign(V) diag(v2)`, eq. 5 of LittleBit.

    Args:
        U (`torch.Tensor`): `[b, r]`.
        V (`torch.Tensor`): `[r, a]`.
        u1 (`torch.Tensor`), u2 (`torch.Tensor`), v1 (`torch.Tensor`), v2 (`torch.Tensor`): `[b]`, `[r]`, `[r]`, `[a]`.
    """

    U: torch.Tensor
    V: torch.Tensor
    u1: torch.Tensor
    u2: torch.Tensor
    v1: torch.Tensor
    v2: torch.Tensor

    def to_dense(self) -> torch.Tensor:
        """The weight that the path stands for, `[b, a]`."""
        rows = hard_sign(self.U) * (self.u2 * self.v1)
        return (rows @ hard_sign(self.V)) * self.u1[:, None] * self.v2


def hard_sign(values: torch.Tensor) -> torch.Tensor:
    """-1 where a value is below 0, else 1; both zeros give 1."""
    return torch.where(values < 0, -1.0, 1.0).to(values.dtype)


class SmoothSign(torch.autograd.Function):
    """[`hard_sign`] whose gradient is that of `tanh(alpha x)`: `alpha (1 - tanh(alpha x)^2)`."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, alpha: float = 100.0) -> torch.Tensor:
        ctx.save_for_backward(values)
        ctx.alpha = alpha
        return hard_sign(values)

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        (values,) = ctx.saved_tensors
        return grad_output * ctx.alpha * (1 - torch.tanh(ctx.alpha * values).square()), None


class StraightThroughSign(torch.autograd.Function):
    """[`hard_sign`] whose gradient is 1 between -1 and 1, else 0."""

    @staticmethod
    def forward(ctx, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values)
        return hard_sign(values)

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor) -> torch.Tensor:
        (values,) = ctx.saved_tensors
        return grad_output * (values.abs() < 1)


def binary_linear(
    hidden_states: torch.Tensor, path: BinaryPath, sign: Callable[[torch.Tensor], torch.Tensor] = hard_sign
) -> torch.Tensor:
    """`((((x v2) sign(V)^T) (u2 v1)) sign(U)^T) u1`, eq. 5 of LittleBit, in the dtype of `hidden_states`.

    Args:
        hidden_states (`torch.Tensor`): x, `[..., a]`.
        path (`BinaryPath`): the factors.
        sign (`Callable`, *optional*): [`SmoothSign`]`.apply` and [`StraightThroughSign`]`.apply` pass gradients on.

    Returns:
        `[..., b]`.
    """
    dtype = hidden_states.dtype
    latents = F.linear(hidden_states * path.v2.to(dtype), sign(path.V).to(dtype)) * (path.u2 * path.v1).to(dtype)
    return F.linear(latents, sign(path.U).to(dtype)) * path.u1.to(dtype)


def row_efficiency(vectors: torch.Tensor) -> torch.Tensor:
    """`|z|_1^2 / (r |z|_2^2)` of each row: the share of its energy that its signs keep with one scale.

    From `1/r`, a single spike, to 1, all entries of one size; `2/pi` for normal entries; 1 for a row of zeros.

    Args:
        vectors (`torch.Tensor`): `[n, r]`.

    Returns:
        `[n]`.
    """
    energy = vectors.shape[1] * vectors.square().sum(1)
    return torch.where(energy > 0, vectors.abs().sum(1).square() / energy, 1.0)


def random_rotation(rank: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A rotation or reflection `[r, r]` drawn evenly from all (Haar)."""
    orthogonal, triangular = torch.linalg.qr(torch.randn(rank, rank, generator=generator, dtype=dtype))
    return orthogonal * hard_sign(triangular.diagonal())


def joint_itq(vectors: torch.Tensor, iterations: int = 50, *, rotation: torch.Tensor) -> torch.Tensor:
    """Rotation `R` after which the rows of `Z` are closer to sign vectors: minimises `|sign(Z R) - Z R|_F^2`.

    ITQ ([Gong and Lazebnik](https://doi.org/10.1109/CVPR.2011.5995432)) on both factors jointly: in turn
    `B = sign(Z R)` and `R = Q P^T` from the SVD `P S Q^T = B^T Z`. `|Z R|_1` never falls. Rows of large norm count
    more; neither centring nor normalisation.

    Args:
        vectors (`torch.Tensor`): `Z = [U; V^T]`, `[b + a, r]`.
        iterations (`int`, *optional*, defaults to 50): good range: 20 to 100.
        rotation (`torch.Tensor`): the start, `[r, r]`, from [`random_rotation`].

    Returns:
        `R`, `[r, r]`, orthogonal.
    """
    for _ in range(iterations):
        left, _, right = torch.linalg.svd(torch.sign(vectors @ rotation).T @ vectors)
        rotation = right.T @ left.T
    return rotation


def dual_svid(left: torch.Tensor, right: torch.Tensor) -> BinaryPath:
    """Factors with the scales of the best rank-1 fits `u1 u2^T` of `|U|` and `v1 v2^T` of `|V|`.

    Args:
        left (`torch.Tensor`): U, `[b, r]`.
        right (`torch.Tensor`): V, `[r, a]`.

    Returns:
        [`BinaryPath`], its scales not negative.
    """
    return BinaryPath(left, right, *_rank_one(left.abs()), *_rank_one(right.abs()))


def factorize(
    weight: torch.Tensor,
    rank: int,
    *,
    paths: int = 2,
    rotation: Literal["joint_itq", "random", "none"] = "joint_itq",
    iterations: int = 50,
    generator: torch.Generator,
) -> list[BinaryPath]:
    """The start of LittleBit-2: `U = U_t sqrt(S) R` and `V = R^T sqrt(S) V_t^T` of the rank-r SVD, then [`dual_svid`].

    The rotation leaves `U V` as it is and disappears in the factors. A second path starts from what the first, with
    its signs, leaves over. Without rotation this is LittleBit's start.

    Args:
        weight (`torch.Tensor`): `[b, a]`, finite, float32 or float64; not changed.
        rank (`int`): r of each path. Beyond `min(a, b)` the factors are padded with zeros.
        paths (`int`, *optional*, defaults to 2): 1, or 2 for a residual path of the same rank.
        rotation (`str`, *optional*, defaults to `"joint_itq"`): [`joint_itq`], its random start alone, or none.
        iterations (`int`, *optional*, defaults to 50): of [`joint_itq`].
        generator (`torch.Generator`): on the CPU; the global one is not touched.

    Returns:
        `list[BinaryPath]`, `paths` long.
    """
    found: list[BinaryPath] = []
    for _ in range(paths):
        left, right = _svd_factors(weight, rank, generator)
        if rotation != "none":
            rotated = random_rotation(rank, generator, weight.dtype).to(weight.device)
            if rotation == "joint_itq":
                rotated = joint_itq(torch.cat([left, right.T]), iterations, rotation=rotated)
            left, right = left @ rotated, rotated.T @ right
        found.append(dual_svid(left, right))
        weight = weight - found[-1].to_dense()
    return found


def rank_for(
    out_features: int,
    in_features: int,
    bits: float,
    paths: int,
    *,
    factor: float = 1.0,
    multiple: int = 8,
    minimum: int = 8,
) -> int:
    """Rank of each path for `bits` bits a weight, rounded down to a `multiple`, but not below `minimum`.

    Args:
        out_features (`int`), in_features (`int`): b, a.
        bits (`float`): bits a weight, scales included.
        paths (`int`): 1 or 2.
        factor (`float`, *optional*, defaults to 1.0): of the rank, before rounding.
    """
    budget = out_features * in_features * bits - 16 * paths * (out_features + in_features)
    rank = int(factor * budget / (paths * (out_features + in_features + 16)))
    return max(rank // multiple * multiple, minimum)


def bits_per_weight(out_features: int, in_features: int, rank: int, paths: int) -> float:
    """A bit an entry of each factor and 16 an entry of h, l and g, over the weights of the layer."""
    bits = paths * rank * (out_features + in_features + 16) + 16 * paths * (out_features + in_features)
    return bits / (out_features * in_features)


def distillation_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    hidden_states: Sequence[torch.Tensor],
    teacher_hidden_states: Sequence[torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    hidden_loss_weight: float = 10.0,
) -> torch.Tensor:
    """`KL(teacher | student)` plus `hidden_loss_weight` times the sum over layers of the mean squared error.

    The first term is a sum over the tokens of a row, averaged over the batch: the weight of the second is balanced
    against that. Confirmed in the authors' code, which has no padding. Padding is left out of both (ours): of the
    second by averaging each row over its own tokens, so that the loss of a batch is the mean over its rows.

    Args:
        logits (`torch.Tensor`), teacher_logits (`torch.Tensor`): `[batch, length, vocabulary]`.
        hidden_states (`Sequence[torch.Tensor]`), teacher_hidden_states (`Sequence[torch.Tensor]`): the outputs of all
            blocks, `[batch, length, hidden]` each, the last one behind the final norm.
        attention_mask (`torch.Tensor`, *optional*): `[batch, length]`, 0 at padding.
        hidden_loss_weight (`float`, *optional*, defaults to 10.0): 0 leaves the second term out.

    Returns:
        A scalar in float32 or better.
    """
    if attention_mask is None:
        attention_mask = logits.new_ones(logits.shape[:2])
    rows = zip(logits, teacher_logits, attention_mask, strict=True)
    divergences = [checkpoint(_divergence, *row, use_reentrant=False) for row in rows]
    loss = torch.stack(divergences).mean()
    if hidden_loss_weight == 0:
        return loss
    share = attention_mask.to(loss.dtype)
    share = share / share.sum(1, keepdim=True).clamp(min=1)
    for states, teacher_states in zip(hidden_states, teacher_hidden_states, strict=True):
        error = (_full(states) - _full(teacher_states)).square().mean(-1)
        loss = loss + hidden_loss_weight * (error * share).sum(1).mean()
    return loss


def _divergence(logits: torch.Tensor, teacher_logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Summed over the tokens of one row: with its softmaxes made again in the backward pass, one row is in memory."""
    log_probabilities, teacher = F.log_softmax(_full(logits), -1), F.log_softmax(_full(teacher_logits), -1)
    by_token = F.kl_div(log_probabilities, teacher, reduction="none", log_target=True).sum(-1)
    return (by_token * mask).sum()


def _full(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _svd_factors(weight: torch.Tensor, rank: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """`U_t sqrt(S)` and `sqrt(S) V_t^T` of the rank-r SVD."""
    least = min(weight.shape)
    if least <= EXACT_SVD_LIMIT or rank + SVD_OVERSAMPLING >= least:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        left, values, right = _random_svd(weight, rank + SVD_OVERSAMPLING, generator)
    roots = values[:rank].sqrt()
    left, right = left[:, :rank] * roots, roots[:, None] * right[:rank]
    missing = rank - len(roots)
    return F.pad(left, (0, missing)), F.pad(right, (0, 0, 0, missing))


def _random_svd(weight: torch.Tensor, rank: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Subspace iteration, https://arxiv.org/abs/0909.4061 algorithm 4.4; torch's own draws from the global RNG."""
    draw = torch.randn(weight.shape[1], rank, generator=generator, dtype=weight.dtype).to(weight.device)
    basis = torch.linalg.qr(weight @ draw).Q
    for _ in range(SVD_ITERATIONS):
        basis = torch.linalg.qr(weight @ torch.linalg.qr(weight.T @ basis).Q).Q
    left, values, right = torch.linalg.svd(basis.T @ weight, full_matrices=False)
    return basis @ left, values, right


def _rank_one(magnitudes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`sqrt(s) u` and `sqrt(s) v` of the largest singular value; neither has a negative entry (Perron-Frobenius)."""
    if magnitudes.shape[0] < magnitudes.shape[1]:
        return _rank_one(magnitudes.T)[::-1]
    right = torch.linalg.eigh(magnitudes.T @ magnitudes).eigenvectors[:, -1].abs()
    left = magnitudes @ right
    root = left.norm().sqrt()
    return F.normalize(left, dim=0) * root, right * root
