"""The equations of OSAQ, Outlier Self-Absorption (https://huggingface.co/papers/2605.04738), on plain tensors.

The paper's full text and code were not available: the equations below follow two independent accounts of its method
section, and what is ours says so. Symbols: `W` weight `[M, N]` (out, in), rows `w`; `H = X^T X / tokens` `[N, N]`;
`NN` null basis `[K, N]` with orthonormal rows, columns `n_j`; `beta` `[M, K]`; `s` peak weights `[M, N]`. The result
is `W' = W + beta NN`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F


_CHUNK_ELEMENTS = 2**24  # elements of the largest temporary: 64 MiB in float32
_BATCHED_CHOLESKY_PENALTY = 8  # time per operation of many small factorisations, in units of a large product's


@dataclass(frozen=True)
class NullSpace:
    """Directions that the inputs of a layer hardly use. Compute it once for layers that share their input.

    Args:
        basis (`torch.Tensor`): `NN`, `[K, N]`, orthonormal rows.
        eigenvalues (`torch.Tensor`): `[K]`, ascending: the energy of the inputs along each row.
    """

    basis: torch.Tensor
    eigenvalues: torch.Tensor


@dataclass(frozen=True)
class AbsorbResult:
    """What [`absorb`] returns.

    Args:
        weight (`torch.Tensor`): `W'`, `[M, N]`, in float32 or wider; cast it where it is stored.
        null_rank (`int`): K, the number of directions that could be used.
        range_ratio (`float`): mean over rows of `(max - min)` after over before; below 1 where absorption helps. With
            groups, of the mean range of the row's groups.
        drift (`torch.Tensor`): `[M]`, `dw^T H dw / w^T H w` of each row: its relative squared output error.
    """

    weight: torch.Tensor
    null_rank: int
    range_ratio: float
    drift: torch.Tensor


def null_space(
    hessian: torch.Tensor,
    gamma: float,
    *,
    k_rule: Literal["max", "min"] = "max",
    max_null_ratio: float = 0.5,
    dtype: torch.dtype = torch.float64,
) -> NullSpace:
    """Eigenvectors of the smallest eigenvalues that together hold a share `gamma` of the energy.

    `K = max {k : sum_{i<=k} lambda_i <= gamma * sum_i lambda_i}`, at most `max_null_ratio * N`. The energy share is
    confirmed; the paper's own rule is `k_rule="min"`, the first k to reach the share. `"max"` (ours) differs by at
    most one direction, never exceeds the share, and is a no-op where there is no tail. The cap is ours: without it a
    few directions of huge energy make all ordinary ones count as null.

    Args:
        hessian (`torch.Tensor`): `[N, N]`, symmetric, of any positive scale.
        gamma (`float`): share of the energy, 0 to 1; 0 is a no-op. Good range: 1e-3 to 3e-2.
        k_rule (`str`, *optional*, defaults to `"max"`): `"max"` or `"min"`.
        max_null_ratio (`float`, *optional*, defaults to 0.5): largest K as a share of N, at least 0 and below 1: with
            all directions free the weight collapses to 0.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float64`): of the eigendecomposition; the small
            eigenvalues decide, so float32 only suits inputs without huge activations.

    Returns:
        [`NullSpace`], in `dtype`. K is 0 if the Hessian is all zeros: nothing is known about such a layer.

    Raises:
        ValueError: the Hessian is not finite, or a setting is out of its range.
    """
    if not 0 <= max_null_ratio < 1:
        raise ValueError(
            f"max_null_ratio is {max_null_ratio}; it must be at least 0 and below 1, as with all directions free the "
            "weight collapses to 0."
        )
    if k_rule not in ("max", "min"):
        raise ValueError(f'k_rule is {k_rule!r}; use "max" or "min".')
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; it is a share of the energy and must lie between 0 and 1.")
    if not hessian.isfinite().all():
        raise ValueError("the Hessian has values that are not finite; check the calibration text and the model dtype.")
    most = int(max_null_ratio * len(hessian))
    if most == 0:
        return NullSpace(hessian.new_zeros(0, len(hessian), dtype=dtype), hessian.new_zeros(0, dtype=dtype))
    eigenvalues, eigenvectors = torch.linalg.eigh(hessian.to(dtype))
    eigenvalues = eigenvalues.clamp(min=0)  # a rank-deficient Hessian returns tiny negatives
    energy = eigenvalues.cumsum(0)
    if energy[-1] == 0:
        rank = 0
    elif k_rule == "max":
        rank = int((energy <= gamma * energy[-1]).sum())
    else:
        rank = int((energy < gamma * energy[-1]).sum()) + int(gamma > 0)
    rank = min(rank, most)
    return NullSpace(eigenvectors[:, :rank].T.contiguous(), eigenvalues[:rank])


def peak_weights(weight: torch.Tensor, tau: float, group_size: int = -1) -> torch.Tensor:
    """Softmax surrogate of the largest absolute weight: `s_ij = exp(|W_ij| / t) / sum_k exp(|W_ik| / t)`.

    Row-wise softmax confirmed. The temperature is relative here, `t = tau * max_j |W_ij|` (ours: weights are about
    0.02, so that a fixed temperature near 1 weighs all alike). Groups are ours: a softmax inside each group, divided
    by the number of groups, for grids that are per group.

    Args:
        weight (`torch.Tensor`): `[M, N]`.
        tau (`float`): positive; towards 0 only the largest weight counts, `inf` is plain least squares. Good range:
            0.05 to 0.3.
        group_size (`int`, *optional*, defaults to -1): columns a softmax spans; -1 for the whole row.

    Returns:
        `[M, N]`, each row sums to 1. A row of zeros is uniform.
    """
    columns = weight.shape[1]
    width = columns if group_size == -1 else group_size
    magnitude = F.pad(weight.abs(), (0, -columns % width), value=-torch.inf).unflatten(1, (-1, width))
    peak = magnitude.amax(-1, keepdim=True)
    temperature = (tau * peak).clamp(min=torch.finfo(weight.dtype).tiny)
    weights = torch.softmax(magnitude / temperature, dim=-1) / magnitude.shape[1]
    return weights.flatten(1)[:, :columns]


def solve_absorption(
    weight: torch.Tensor,
    weights: torch.Tensor,
    basis: torch.Tensor,
    *,
    mu1: float,
    mu2: float,
    solver: Literal["auto", "primal", "dual", "iterative"] = "auto",
) -> torch.Tensor:
    """Minimises, for each row, `1/2 sum_j s_j (w_j + b^T n_j)^2 + mu1/2 |b|^2 + mu2/2 (b^T v)^2` with `v = sum_j n_j`.

    Closed form (confirmed): `A b = -rho`, `A = NN diag(s) NN^T + mu1 I + mu2 v v^T`, `rho = NN (s * w)`. Since
    `b^T v = sum_j dw_j`, the last term keeps the sum of the row.

    Args:
        weight (`torch.Tensor`): `[M, N]`, float32 or float64.
        weights (`torch.Tensor`): `s`, `[M, N]`, from [`peak_weights`].
        basis (`torch.Tensor`): `NN`, `[K, N]`.
        mu1 (`float`): ridge. Its natural scale is the largest `s`; far below that it makes new outliers. Good range:
            0.2 to 1.
        mu2 (`float`): weight of the row sum; from about 1e-2 on it pins the sum.
        solver (`str`, *optional*, defaults to `"auto"`): all give the same result. `"primal"` factors `A`; `"dual"`
            factors a system of the size of the weights that matter; `"iterative"` runs conjugate gradients to the
            precision of the dtype (ours). `"auto"` takes the cheapest by sizes.

    Returns:
        `beta`, `[M, K]`.
    """
    if basis.shape[0] == 0:
        return weight.new_zeros(weight.shape[0], 0)
    active = _active_columns(weights, mu1)
    if solver == "auto":
        costs = _costs(basis.shape[0], basis.shape[1], active, mu1, weights)
        solver = min(costs, key=costs.get)
    if solver == "primal":
        width, solve = basis.shape[0] ** 2 + basis.numel(), _solve_primal
    elif solver == "dual":
        width, solve = active * (active + 2 * basis.shape[0]), _solve_dual
    elif solver == "iterative":
        width, solve = basis.shape[1] * 4, _solve_iterative
    else:
        raise ValueError(f'solver is {solver!r}; use "auto", "primal", "dual" or "iterative".')
    rows = max(1, _CHUNK_ELEMENTS // width)
    chunks = zip(weight.split(rows), weights.split(rows), strict=True)
    return torch.cat([solve(chunk, peaks, basis, mu1, mu2) for chunk, peaks in chunks])


def absorb(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    space: NullSpace,
    *,
    tau: float = 0.1,
    mu1: float = 0.3,
    mu2: float = 1.0,
    group_size: int = -1,
    drift_tol: float | None = None,
    solver: Literal["auto", "primal", "dual", "iterative"] = "auto",
) -> AbsorbResult:
    """`W' = W + beta NN`: pulls the largest weights of each row down along directions that the inputs hardly use.

    Args:
        weight (`torch.Tensor`): `[M, N]`, any float dtype; not changed.
        hessian (`torch.Tensor`): `[N, N]`, for the drift only.
        space (`NullSpace`): from [`null_space`] of the same Hessian; shared by the layers that share their input.
        tau (`float`), mu1 (`float`), mu2 (`float`): see [`peak_weights`] and [`solve_absorption`].
        group_size (`int`, *optional*, defaults to -1): columns that share a peak. -1, the whole row, is the paper's.
        drift_tol (`float`, *optional*): guard (ours, off unless given): a row whose drift exceeds it, or whose range
            grew, takes the largest of the steps 1, 1/2, 1/4 and 0 that does neither.
        solver (`str`, *optional*, defaults to `"auto"`): see [`solve_absorption`].

    Returns:
        [`AbsorbResult`]. Its weight is the input's own values where K is 0.

    Raises:
        ValueError: a weight is not finite.
    """
    if not weight.isfinite().all():
        raise ValueError("the weight has values that are not finite; load the model in float32 or bfloat16.")
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    hessian = hessian.to(weight.dtype)
    basis = space.basis.to(weight.dtype)
    beta = solve_absorption(weight, peak_weights(weight, tau, group_size), basis, mu1=mu1, mu2=mu2, solver=solver)
    change = beta @ basis
    energy = ((weight @ hessian) * weight).sum(1).clamp(min=torch.finfo(weight.dtype).tiny)
    drift = (beta.square() @ space.eigenvalues.to(weight.dtype)) / energy  # dw^T H dw = sum_k lambda_k b_k^2
    before = _ranges(weight, group_size)
    if drift_tol is not None:
        step = torch.zeros_like(drift)
        for candidate in (0.25, 0.5, 1.0):
            kept = _ranges(weight + candidate * change, group_size) <= before
            step = torch.where(kept & (candidate**2 * drift <= drift_tol), candidate, step)
        change = step[:, None] * change
        drift = step.square() * drift
    absorbed = weight + change
    smallest = torch.finfo(weight.dtype).tiny
    ratio = (_ranges(absorbed, group_size).clamp(min=smallest) / before.clamp(min=smallest)).mean().item()
    return AbsorbResult(absorbed, basis.shape[0], ratio, drift)


def _ranges(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    groups = weight.split(weight.shape[1] if group_size == -1 else group_size, dim=1)
    return torch.stack([group.amax(1) - group.amin(1) for group in groups]).mean(0)


def _active_columns(weights: torch.Tensor, mu1: float) -> int:
    """Columns a row needs so that those dropped change A by less than the dtype's precision, relative to mu1."""
    dropped = weights.sort(dim=1).values.cumsum(1) <= torch.finfo(weights.dtype).eps * mu1
    return weights.shape[1] - int(dropped.sum(1).min())


def _costs(rank: int, columns: int, active: int, mu1: float, weights: torch.Tensor) -> dict[str, float]:
    """Multiplications per row of each solver."""
    costs = {"primal": columns * rank**2 + _BATCHED_CHOLESKY_PENALTY * rank**3 / 3}
    if mu1 > 0:
        costs["dual"] = active**2 * rank + _BATCHED_CHOLESKY_PENALTY * active**3 / 3
        costs["iterative"] = 2 * columns * rank * _iterations(weights, mu1)
    return costs


def _iterations(weights: torch.Tensor, mu1: float) -> int:
    """Steps after which conjugate gradients are exact to the dtype. The preconditioned A has its eigenvalues in
    `[1, 1 + max s / mu1]`, as `NN diag(s) NN^T <= max s`."""
    condition = 1 + weights.max().item() / mu1
    return 2 + math.ceil(0.5 * math.sqrt(condition) * math.log(2 / torch.finfo(weights.dtype).eps))


def _solve_primal(weight, weights, basis, mu1, mu2):
    translation = basis.sum(1)  # v
    regulariser = mu1 * torch.eye(len(basis), dtype=basis.dtype, device=basis.device)
    regulariser += mu2 * torch.outer(translation, translation)
    system = (basis * weights[:, None, :]) @ basis.T + regulariser
    right = (weights * weight) @ basis.T
    # Cholesky: A is positive definite, and a batched LU fails inside MKL on some CPUs.
    return -torch.cholesky_solve(right[..., None], torch.linalg.cholesky(system)).squeeze(-1)


def _solve_dual(weight, weights, basis, mu1, mu2):
    """`b = -B^T (mu1 I + B B^T)^-1 sqrt(s) w` with `B = diag(sqrt(s)) NN^T`, by the push-through identity. The mu2
    term is one more column: v in NN, mu2 in s, 0 in w."""
    top = weights.topk(_active_columns(weights, mu1), dim=1)
    root = top.values.sqrt()
    pseudo = math.sqrt(mu2) * basis.sum(1)
    scaled = torch.cat([root[..., None] * basis.T[top.indices], pseudo.expand(len(weight), 1, -1)], dim=1)
    right = F.pad(root * weight.gather(1, top.indices), (0, 1))[..., None]
    system = scaled @ scaled.mT
    system.diagonal(dim1=1, dim2=2).add_(mu1)
    solution = torch.cholesky_solve(right, torch.linalg.cholesky(system))
    return -(scaled.mT @ solution).squeeze(-1)


def _solve_iterative(weight, weights, basis, mu1, mu2):
    """Conjugate gradients for all rows at once, preconditioned by `mu1 I + mu2 v v^T` (inverted by Sherman-Morrison):
    two products with NN a step, and A is never formed."""
    translation = basis.sum(1)
    share = mu2 / (mu1 + mu2 * translation.square().sum())

    def precondition(vectors):
        return (vectors - share * torch.outer(vectors @ translation, translation)) / mu1

    def apply(vectors):
        peaks = ((vectors @ basis) * weights) @ basis.T
        return peaks + mu1 * vectors + mu2 * torch.outer(vectors @ translation, translation)

    solution = torch.zeros(len(weight), len(basis), dtype=weight.dtype, device=weight.device)
    residual = -(weights * weight) @ basis.T
    direction = preconditioned = precondition(residual)
    squared = (residual * preconditioned).sum(1, keepdim=True)
    enough = torch.finfo(weight.dtype).eps ** 2 * squared
    smallest = torch.finfo(weight.dtype).tiny
    for _ in range(_iterations(weights, mu1)):
        image = apply(direction)
        length = squared / (direction * image).sum(1, keepdim=True).clamp(min=smallest)
        solution = solution + length * direction
        residual = residual - length * image
        preconditioned = precondition(residual)
        previous, squared = squared, (residual * preconditioned).sum(1, keepdim=True)
        if (squared <= enough).all():
            break
        direction = preconditioned + squared / previous.clamp(min=smallest) * direction
    return solution
