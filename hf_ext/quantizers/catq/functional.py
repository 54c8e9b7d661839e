"""The equations of CAT-Q (https://huggingface.co/papers/2606.26650): learnable modulation, softened ternarization, and
the order in which windows of decoder blocks are trained.

Weights are `[out, in]`, cut along `in` into `groups` of `group_size` columns; `[out, groups, group_size]` is a grouped
weight, and what a group owns is `[out, groups, 1]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


# The released code's guard of the scale, added in fp32; the paper's equation 3 has none.
SCALE_EPSILON = 1e-6


@dataclass(frozen=True)
class TernaryGrid:
    """Where a grouped weight stands between the three values of each group.

    Args:
        normalized (`torch.Tensor` `[out, groups, group_size]`): the weight, shifted and scaled.
        mean (`torch.Tensor` `[out, groups, 1]`): the shift; not added back to the ternary weight.
        scale (`torch.Tensor` `[out, groups, 1]`): the distance of the three values.
        threshold (`torch.Tensor` `[out, groups, 1]`): where 0 ends, in units of `scale`.
    """

    normalized: Tensor
    mean: Tensor
    scale: Tensor
    threshold: Tensor


def modulate(
    weight: Tensor,
    mean_factor: Tensor,
    scale_factor: Tensor,
    threshold_factor: Tensor,
    *,
    group_size: int,
    initial_threshold: float = 0.5,
    scale_from_raw: bool = False,
) -> TernaryGrid:
    """Shift and scale every group of `weight` by its statistics and its three learned factors (equation 3).

    Confirmed by the released code, which gives the forms of the factors; with all of them 0 this is centred absmean
    ternarization. Differentiable, through the statistics too.

    Args:
        weight (`torch.Tensor` `[out, in]`): `in` a multiple of `group_size`.
        mean_factor, scale_factor, threshold_factor (`torch.Tensor` `[out, groups, 1]`): unbounded.
        group_size (`int`): columns of a group.
        initial_threshold (`float`, defaults to 0.5): the threshold where its factor is 0.
        scale_from_raw (`bool`, defaults to `False`): take the scale from the weight before it is centred, as one of
            the released configurations does.
    """
    grouped = weight.unflatten(1, (-1, group_size))
    mu_0 = grouped.mean(-1, keepdim=True)
    centred = grouped - mu_0
    alpha_0 = (grouped if scale_from_raw else centred).abs().mean(-1, keepdim=True) + SCALE_EPSILON
    shift = (2 * torch.sigmoid(mean_factor) - 1) * alpha_0
    alpha = 2 * torch.sigmoid(scale_factor) * alpha_0
    delta = 2 * torch.sigmoid(threshold_factor) * initial_threshold
    return TernaryGrid((centred - shift) / alpha, mu_0 + shift, alpha, delta)


def ternarize(normalized: Tensor, threshold: Tensor) -> Tensor:
    """`1` above `threshold`, `-1` below `-threshold`, `0` between and on them (equation 2)."""
    # Halves are rounded to even: a weight on the threshold becomes 0.
    return (normalized * (0.5 / threshold)).round().clamp(-1, 1)


def soften(normalized: Tensor, threshold: Tensor, sharpness: float) -> Tensor:
    """`[tanh(s (x - D)) + tanh(s (x + D))] / (2 tanh s)` (equation 5): the identity for small `s`, ternary for large.

    Args:
        normalized (`torch.Tensor` `[out, groups, group_size]`): `x`.
        threshold (`torch.Tensor` `[out, groups, 1]`): `D`.
        sharpness (`float`): `s`, positive.
    """
    below, above = _tanhs(normalized, threshold, sharpness)
    return below.add(above).div(2 * math.tanh(sharpness))


def _tanhs(x: Tensor, delta: Tensor, s: float) -> tuple[Tensor, Tensor]:
    return x.sub(delta).mul(s).tanh(), x.add(delta).mul(s).tanh()


def ternary_weight(
    weight: Tensor,
    mean_factor: Tensor,
    scale_factor: Tensor,
    threshold_factor: Tensor,
    *,
    sharpness: float | None,
    gradient_sharpness: float | None = None,
    **grid: int | float | bool,
) -> Tensor:
    """The weight that is trained, `scale * soften(...)`, or `scale * ternarize(...)` in the hard stage.

    Equal to [`modulate`] and [`soften`] with their gradients, in a third of the time and without keeping anything of
    the size of the weight for the backward pass.

    Args:
        weight (`torch.Tensor` `[out, in]`), mean_factor, scale_factor, threshold_factor: see [`modulate`].
        sharpness (`float`, *optional*): of the soft stage; `None` is the hard stage.
        gradient_sharpness (`float`, *optional*): in the hard stage the gradient is that of the softened values of this
            sharpness; `None` passes it straight through.
        grid: the other options of [`modulate`].
    """
    return _TernaryWeight.apply(
        weight, mean_factor, scale_factor, threshold_factor, sharpness, gradient_sharpness, grid
    )


# Rows are taken in pieces of this many weights, which stay in the cache from one operation to the next.
PIECE = 2**18


class _TernaryWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, mean_factor, scale_factor, threshold_factor, s, gradient_s, options) -> Tensor:
        ctx.save_for_backward(weight, mean_factor, scale_factor, threshold_factor)
        ctx.sharpness, ctx.gradient_sharpness, ctx.options = s, gradient_s, options
        output = torch.empty_like(weight)
        for rows, *factors in _pieces(weight, mean_factor, scale_factor, threshold_factor):
            grid = modulate(weight[rows], *factors, **options)
            x, delta = grid.normalized, grid.threshold
            values = ternarize(x, delta) if s is None else soften(x, delta, s)
            torch.mul(values, grid.scale, out=output[rows].unflatten(1, (-1, options["group_size"])))
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *factors = ctx.saved_tensors
        grads = [torch.empty_like(tensor) for tensor in (weight, *factors)]
        for rows, *of_rows in _pieces(weight, *factors):
            _gradients(ctx, grad[rows], weight[rows], *of_rows, [whole[rows] for whole in grads])
        return *grads, None, None, None


def _pieces(weight: Tensor, *factors: Tensor):
    size = max(1, PIECE // weight.shape[1])
    for start in range(0, weight.shape[0], size):
        rows = slice(start, start + size)
        yield rows, *(factor[rows] for factor in factors)


def _gradients(ctx, grad, weight, mean_factor, scale_factor, threshold_factor, out: list[Tensor]) -> None:
    """Write the gradients of `sum(grad * alpha * f(x))`, x = (w - mu) / alpha, by the weight and the factors."""
    options, width = ctx.options, ctx.options["group_size"]
    grad, grouped, by_weight = (tensor.unflatten(1, (-1, width)) for tensor in (grad, weight, out[0]))
    grid = modulate(weight, mean_factor, scale_factor, threshold_factor, **options)
    x, alpha = grid.normalized, grid.scale
    values, by_x, by_delta = _values_and_slopes(x, grid.threshold, ctx.sharpness, ctx.gradient_sharpness)
    torch.mul(by_x, grad, out=by_weight)
    d_mu, d_alpha, d_delta = (2 * torch.sigmoid(factor) for factor in (mean_factor, scale_factor, threshold_factor))
    d_mu -= 1
    alpha_0 = alpha / d_alpha
    through_mu = -by_weight.sum(-1, keepdim=True)
    through_alpha = values.sub_(x.mul_(by_x)).mul_(grad).sum(-1, keepdim=True)
    through_delta = by_delta.mul_(grad).sum(-1, keepdim=True) * alpha
    if options.get("scale_from_raw", False):
        signs = grouped.sign()
    else:
        signs = torch.sign(grouped - grid.mean + d_mu * alpha_0)
        signs -= signs.mean(-1, keepdim=True)
    by_weight.addcmul_(signs, (through_mu * d_mu + through_alpha * d_alpha) / width).add_(through_mu / width)
    torch.mul(through_mu * alpha_0, (1 - d_mu**2) / 2, out=out[1])
    torch.mul(through_alpha * alpha_0, d_alpha * (1 - d_alpha / 2), out=out[2])
    torch.mul(through_delta * options.get("initial_threshold", 0.5), d_delta * (1 - d_delta / 2), out=out[3])


def _values_and_slopes(
    x: Tensor, delta: Tensor, s: float | None, gradient_s: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """f, df/dx and df/dD; in the hard stage f is ternary and the slopes are those of `gradient_s`, or 1 and 0."""
    steepness = gradient_s if s is None else s
    if steepness is None:
        return ternarize(x, delta), torch.ones_like(x), torch.zeros_like(x)
    below, above = _tanhs(x, delta, steepness)
    values = ternarize(x, delta) if s is None else below.add(above).div_(2 * math.tanh(steepness))
    slope = steepness / (2 * math.tanh(steepness))
    below, above = below.square_().mul_(slope), above.square_().mul_(slope)
    by_delta = below - above
    return values, below.add_(above).neg_().add_(2 * slope), by_delta


def sharpness(epoch: int, epochs: int, final_sharpness: float, soft_ratio: float) -> float | None:
    """The `s` of an epoch counted from 0, or `None` in the hard stage (equation 6).

    `t = (epoch + 1) / epochs` and `s = t / gamma * s_0` while `t <= gamma`. That time is constant within an epoch and
    that its first value is `1 / epochs` is our reading; 60 epochs at `gamma = 0.8` are then 48 soft and 12 hard ones.
    """
    if soft_ratio == 0:
        return None
    soft_epochs = max(soft_ratio * epochs, 1.0)
    return None if epoch >= math.floor(soft_epochs + 1e-9) else (epoch + 1) / soft_epochs * final_sharpness


def windows(blocks: int, num_layers: int, stride: int, fill: int) -> list[range]:
    """The windows of decoder blocks in the order they are trained: growing, sliding, shrinking.

    Confirmed by the window trainer that CAT-Q is built on.

    Args:
        blocks (`int`): decoder blocks of the model.
        num_layers (`int`): blocks in a sliding window.
        stride (`int`): blocks between the starts of two sliding windows; at most `num_layers`.
        fill (`int`): the first window that does not grow, and the last that has not begun to shrink, hold as many.
    """
    fill = min(fill, blocks)
    schedule = [range(stop) for stop in range(1, fill + 1)]
    first = max(fill - stride, 0)
    sliding = math.ceil((blocks - 2 * first - num_layers) / stride) + 1
    sliding = max(sliding, 1 if blocks > 2 * fill else 0)  # long windows must not leave a gap between the two ends
    starts = (first + stride * number for number in range(sliding))
    schedule += [range(start, min(start + num_layers, blocks)) for start in starts]
    schedule += [range(blocks - size, blocks) for size in range(fill, 0, -1)]
    return _without_repeats(schedule)


def _without_repeats(schedule: list[range]) -> list[range]:
    """Starts that never go back, and no window twice in a row: short models make the three parts overlap."""
    kept: list[range] = []
    for window in schedule:
        if not kept or (window != kept[-1] and window.start >= kept[-1].start):
            kept.append(window)
    return kept


def huber_delta(window: int, windows: int, least: float, most: float) -> float:
    """Where the Huber loss of a window turns linear: from `least` at the first one towards `most` past the last."""
    return least + window / windows * (most - least)
