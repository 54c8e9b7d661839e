"""Rounding a weight to a low-bit grid: min-max grids, round-to-nearest, GPTQ and coordinate descent.

Shapes used throughout: weight `[out, in]`; hessian `[in, in]`, the second moment `X^T X / tokens` of the layer's
inputs; codes uint8 `[out, in]`; scale float32 and zero uint8 `[out, groups]`, `groups = ceil(in / group_size)`
(the last group may be ragged, `group_size=-1` is one group a row). A weight is `(code - zero) * scale`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


_DAMP_ATTEMPTS = 6
_DAMP_GROWTH = 10.0
_DAMP_FLOOR = 1e-3


class HessianFactorizationError(RuntimeError):
    """No damping that was tried made the Hessian positive definite: fall back to rounding to the nearest, or fix the
    statistics."""


@dataclass(frozen=True)
class GPTQResult:
    """What [`gptq`] returns.

    Args:
        codes (`torch.Tensor`): uint8 `[out, in]`, in the original column order.
        scale (`torch.Tensor`): float32 `[out, groups]`.
        zero (`torch.Tensor`): uint8 `[out, groups]`.
        damp_percent_used (`float`): the damping that factored; larger than the one asked for if that one failed.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    damp_percent_used: float


def min_max_grid(weight: torch.Tensor, bits: int, group_size: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Asymmetric grid of each group: its range, widened to include 0, cut into `2**bits - 1` steps.

    Args:
        weight (`torch.Tensor`): `[out, in]`, finite.
        bits (`int`): 1 to 8.
        group_size (`int`, *optional*, defaults to -1): columns that share a scale; -1 for the whole row.

    Returns:
        scale float32 and zero uint8, both `[out, groups]`. A group that is all zeros, or too small for float32 to
        divide, gets scale 1 and zero 0.

    Raises:
        ValueError: a weight is not finite, or `group_size` is neither -1 nor positive.
    """
    _check_finite(weight, "weight")
    grouped = _grouped(weight.float(), group_size)
    levels = 2**bits - 1
    low = grouped.amin(-1).clamp(max=0) / levels
    scale = grouped.amax(-1).clamp(min=0) / levels - low
    empty = scale < torch.finfo(torch.float32).tiny
    scale = scale.masked_fill(empty, 1.0)
    zero = torch.round(-low / scale * levels).clamp(0, levels).masked_fill(empty, 0)
    return scale, zero.to(torch.uint8)


def round_to_grid(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, group_size: int = -1
) -> torch.Tensor:
    """Codes of the nearest grid points (RTN, round to nearest), uint8 `[out, in]`.

    Args:
        weight (`torch.Tensor`): `[out, in]`, finite.
        scale (`torch.Tensor`), zero (`torch.Tensor`): `[out, groups]`, as [`min_max_grid`] returns them.
        bits (`int`): 1 to 8.
        group_size (`int`, *optional*, defaults to -1): the one that the grid was made with.

    Raises:
        ValueError: a weight is not finite.
    """
    _check_finite(weight, "weight")
    scale, zero = _per_column(scale, zero, weight.shape[1], group_size)
    return _nearest(weight.float(), scale, zero, 2**bits - 1).to(torch.uint8)


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    bits: int,
    group_size: int = -1,
    *,
    damp_percent: float = 0.01,
    desc_act: bool = False,
    block_size: int = 128,
) -> GPTQResult:
    """GPTQ: rounds one column at a time and lets the columns still to come make up for the error.

    [GPTQ](https://huggingface.co/papers/2210.17323), algorithm 1, with the group grids taken from the weights as
    updated so far. Confirmed: it equals an explicit recomputation of the inverse at every column.

    Args:
        weight (`torch.Tensor`): `[out, in]`, finite; not changed.
        hessian (`torch.Tensor`): `[in, in]`, symmetric; any positive scale. An input that was always 0 (diagonal 0) is
            left out of the compensation and its weights become 0.
        bits (`int`): 2 to 8.
        group_size (`int`, *optional*, defaults to -1): columns that share a scale; -1 for the whole row.
        damp_percent (`float`, *optional*, defaults to 0.01): share of the mean diagonal added to the diagonal. It is
            raised tenfold until the Hessian factors. Good range: 0.005 to 0.1.
        desc_act (`bool`, *optional*, defaults to `False`): round the columns of the most active inputs first. The
            grids then come from the original weights of each original group, so that the stored layout stays plain.
        block_size (`int`, *optional*, defaults to 128): columns between two updates of the rest; changes speed only.

    Returns:
        [`GPTQResult`]

    Raises:
        ValueError: `weight` or `hessian` is not finite, or their shapes disagree.
        HessianFactorizationError: no damping helped.
    """
    _check_finite(weight, "weight")
    _check_hessian(hessian, weight)
    columns = weight.shape[1]
    levels = 2**bits - 1
    dead = hessian.diagonal() == 0
    transposed = weight.float().masked_fill(dead, 0.0).T.contiguous()
    static = desc_act or group_size == -1 or group_size >= columns
    order = hessian.diagonal().argsort(descending=True) if desc_act else torch.arange(columns, device=weight.device)
    factor, damp_percent_used = _inverse_factor(hessian[order][:, order], dead[order], damp_percent)
    width = columns if group_size == -1 else group_size
    groups = -(-columns // width)
    if static:
        scale, zero = (grid.T.contiguous() for grid in min_max_grid(transposed.T, bits, group_size))
    else:
        scale = torch.empty(groups, weight.shape[0], device=weight.device)
        zero = torch.empty(groups, weight.shape[0], device=weight.device, dtype=torch.uint8)
    work = transposed[order] if desc_act else transposed
    codes = torch.empty_like(work, dtype=torch.uint8)
    group_of = (order // width).tolist()
    for start, stop in _blocks(columns, block_size, columns if static else width):
        errors = torch.empty_like(work[start:stop])
        for column in range(start, stop):
            group = group_of[column]
            if not static and column % width == 0:
                grid = min_max_grid(work[column : column + width].T, bits)
                scale[group], zero[group] = grid[0][:, 0], grid[1][:, 0]
            code = _nearest(work[column], scale[group], zero[group], levels)
            error = (work[column] - (code - zero[group]) * scale[group]) / factor[column, column]
            work[column + 1 : stop].addr_(factor[column, column + 1 : stop], error, alpha=-1)
            codes[column] = code
            errors[column - start] = error
        work[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    restored = torch.empty_like(codes)
    restored[order] = codes
    return GPTQResult(restored.T.contiguous(), scale.T.contiguous(), zero.T.contiguous(), damp_percent_used)


def coordinate_descent(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    hessian: torch.Tensor,
    bits: int,
    group_size: int = -1,
    *,
    sweeps: int = 10,
    block_size: int = 128,
) -> torch.Tensor:
    """Improves codes on a frozen grid, one column at a time.

    Each step sets one column to the exact minimiser, over the grid, of `(q - w)^T H (q - w)` with the other columns
    fixed, so that the error of the layer's output never grows. Rows are independent. A reconstruction: the paper names
    coordinate descent after GPTQ but its form was not available; this is the usual cyclic one
    ([QuantEase](https://huggingface.co/papers/2309.01885), section 3).

    Args:
        weight (`torch.Tensor`): `[out, in]`, what the codes should stand for.
        codes (`torch.Tensor`), scale (`torch.Tensor`), zero (`torch.Tensor`): the start, as [`gptq`] returns it; not
            changed.
        hessian (`torch.Tensor`): `[in, in]`. Columns whose diagonal is 0 keep their codes.
        bits (`int`), group_size (`int`): those of the grid.
        sweeps (`int`, *optional*, defaults to 10): passes over all columns at most; it stops when nothing changes.
        block_size (`int`, *optional*, defaults to 128): changes speed only.

    Returns:
        uint8 codes `[out, in]`.

    Raises:
        ValueError: `weight` or `hessian` is not finite, or their shapes disagree.
    """
    _check_finite(weight, "weight")
    _check_hessian(hessian, weight)
    columns = weight.shape[1]
    levels = 2**bits - 1
    hessian = hessian.float()
    target = weight.float().T.contiguous()
    scale, zero = (grid.T.contiguous() for grid in _per_column(scale, zero, columns, group_size))
    current = (codes.T.float() - zero) * scale
    curvature = hessian.diagonal().tolist()
    for _ in range(sweeps):
        gradient = hessian @ (current - target)  # recomputed each sweep: float32 updates would drift
        changed = False
        for start, stop in _blocks(columns, block_size, columns):
            before = current[start:stop].clone()
            for column in range(start, stop):
                if curvature[column] <= 0:
                    continue
                best = current[column] - gradient[column] / curvature[column]
                code = _nearest(best, scale[column], zero[column], levels)
                step = (code - zero[column]) * scale[column] - current[column]
                gains = step * (step * curvature[column] + 2 * gradient[column]) < 0
                step = step * gains  # rounding noise at a tie must not undo progress
                current[column] += step
                gradient[start:stop].addr_(hessian[start:stop, column], step)
            moved = current[start:stop] - before
            changed = changed or bool(moved.any())
            gradient[stop:].addmm_(hessian[stop:, start:stop], moved)
        if not changed:
            break
    return _nearest(current, scale, zero, levels).to(torch.uint8).T.contiguous()


def output_error(quantized: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """Relative error of the layer's output, `|X (Q - W)^T| / |X W^T|` in the Frobenius norm.

    Args:
        quantized (`torch.Tensor`), weight (`torch.Tensor`): `[out, in]`.
        hessian (`torch.Tensor`): `[in, in]`, second moment of the inputs.

    Returns:
        `float`: 0 for an exact layer, 1 for one that answers 0; 0 where the weight's own output is 0.
    """
    hessian = hessian.float()
    difference = quantized.float() - weight.float()
    error = ((difference @ hessian) * difference).sum().clamp(min=0)
    energy = ((weight.float() @ hessian) * weight.float()).sum()
    return (error / energy).sqrt().item() if energy > 0 else 0.0


def _nearest(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, levels: int) -> torch.Tensor:
    return torch.round(weight / scale).add_(zero).clamp_(0, levels)


def _grouped(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """`[out, groups, width]`, the ragged end filled with zeros: every grid includes 0 anyway."""
    if group_size != -1 and group_size < 1:
        raise ValueError(f"group_size is {group_size}; use -1 for one group a row, or a positive number of columns.")
    width = weight.shape[1] if group_size == -1 else group_size
    return F.pad(weight, (0, -weight.shape[1] % width)).unflatten(1, (-1, width))


def _per_column(
    scale: torch.Tensor, zero: torch.Tensor, columns: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    width = columns if group_size == -1 else group_size
    return tuple(grid.float().repeat_interleave(width, dim=1)[:, :columns] for grid in (scale, zero))


def _blocks(columns: int, block_size: int, group_size: int):
    """Column spans of at most `block_size` that never let a group start inside a span it does not end or fill in, so
    that a group's grid sees every update due to it."""
    span = group_size if group_size >= block_size else block_size // group_size * group_size
    for first in range(0, columns, span):
        end = min(first + span, columns)
        for start in range(first, end, block_size):
            yield start, min(start + block_size, end)


def _inverse_factor(hessian: torch.Tensor, dead: torch.Tensor, damp_percent: float) -> tuple[torch.Tensor, float]:
    """Upper triangular U with `U^T U = (H + damping)^-1`, float32, and the damping that worked.

    `H = R R^T` with R upper triangular is the ordinary Cholesky factor of H with both axes reversed, and `U = R^-1`:
    one factorisation and one triangular solve, and H is never inverted. Float64, as small pivots decide the result.
    """
    reversed_hessian = hessian.double().flip(0, 1)
    diagonal = reversed_hessian.diagonal()
    alive = ~dead.flip(0)
    mean = diagonal[alive].mean() if alive.any() else diagonal.new_ones(())
    base = diagonal.masked_fill(~alive, 1.0)
    damp = damp_percent
    for _ in range(_DAMP_ATTEMPTS):
        damped = reversed_hessian.diagonal_scatter(base + damp * mean)
        lower, info = torch.linalg.cholesky_ex(damped)
        if info.item() == 0:
            upper = lower.flip(0, 1)
            identity = torch.eye(len(base), dtype=upper.dtype, device=upper.device)
            factor = torch.linalg.solve_triangular(upper, identity, upper=True).float()
            if factor.isfinite().all() and (factor.diagonal() > 0).all():
                return factor, damp
        damp = max(damp, _DAMP_FLOOR) * _DAMP_GROWTH
    raise HessianFactorizationError(
        f"the {len(base)} x {len(base)} Hessian did not factor with damp_percent from {damp_percent} to "
        f"{damp / _DAMP_GROWTH}: it has large negative eigenvalues, so it is no second moment of inputs. Collect the "
        "statistics again in float32, or round to the nearest instead."
    )


def _check_hessian(hessian: torch.Tensor, weight: torch.Tensor) -> None:
    columns = weight.shape[1]
    if tuple(hessian.shape) != (columns, columns):
        raise ValueError(
            f"the Hessian is {list(hessian.shape)} but the weight {list(weight.shape)} needs [{columns}, {columns}]."
        )
    _check_finite(hessian, "Hessian")


def _check_finite(tensor: torch.Tensor, name: str) -> None:
    bad = tensor.numel() - int(tensor.isfinite().sum())
    if bad:
        raise ValueError(
            f"the {name} has {bad} values of {tensor.numel()} that are not finite; load the model in float32 or "
            "bfloat16 and check the calibration text."
        )
