"""The equations of OSAQ against closed forms, in float64."""

import math

import pytest
import torch

from hf_ext.quantizers.osaq.functional import (
    NullSpace,
    absorb,
    null_space,
    peak_weights,
    solve_absorption,
)
from hf_ext.quantizers.rounding import min_max_grid, round_to_grid
from tests.numerics import assert_matches


ROWS, COLUMNS, TOKENS = 12, 24, 400
SOLVERS = ("primal", "dual", "iterative")


def make_weight(seed=0, rows=ROWS, columns=COLUMNS):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_inputs(seed=1, tokens=TOKENS, columns=COLUMNS, rank=None):
    generator = torch.Generator().manual_seed(seed)
    rank = columns if rank is None else rank
    factors = torch.randn(tokens, rank, generator=generator, dtype=torch.float64)
    factors = factors * torch.logspace(0, -2, rank, dtype=torch.float64)
    return factors @ torch.randn(rank, columns, generator=generator, dtype=torch.float64)


def second_moment(inputs):
    return inputs.T @ inputs / len(inputs)


def make_space(gamma=1e-2, **kwargs):
    hessian = second_moment(make_inputs())
    return hessian, null_space(hessian, gamma, **kwargs)


def assert_vanishes(value, beside=1.0):
    """`value` is zero to float64 rounding on the scale of `beside`."""
    assert_matches(beside + value, torch.full_like(value, beside), "fp64")


def objective(beta, weight, weights, basis, mu1, mu2):
    """The paper's J, one value a row."""
    change = beta @ basis
    peaks = (weights * (weight + change).square()).sum(1)
    return (peaks + mu1 * beta.square().sum(1) + mu2 * (beta @ basis.sum(1)).square()) / 2


def test_oracle_01_an_exact_null_space_leaves_the_output():
    inputs = make_inputs(rank=15)
    hessian = second_moment(inputs)
    space = null_space(hessian, 1e-12, max_null_ratio=0.9)
    weight = make_weight()
    result = absorb(weight, hessian, space)
    assert result.null_rank == COLUMNS - 15
    assert (result.weight - weight).norm() > 0.1 * weight.norm()
    assert_vanishes((result.weight - weight) @ inputs.T)


def test_oracle_02_drift_is_within_the_energy_bound():
    hessian, space = make_space()
    weight = make_weight()
    result = absorb(weight, hessian, space)
    change = result.weight - weight
    energy = ((change @ hessian) * change).sum(1)
    assert 0 < result.null_rank < COLUMNS
    assert_matches(result.drift, energy / ((weight @ hessian) * weight).sum(1), "fp64")
    assert (energy <= space.eigenvalues[-1] * change.square().sum(1)).all()
    assert space.eigenvalues.sum() <= 1e-2 * hessian.trace()


@pytest.mark.parametrize("solver", SOLVERS)
def test_oracle_03_infinite_temperature_is_plain_least_squares(solver):
    hessian, space = make_space()
    weight = make_weight()
    weights = peak_weights(weight, math.inf)
    assert_matches(weights, torch.full_like(weight, 1 / COLUMNS), "fp64")
    beta = solve_absorption(weight, weights, space.basis, mu1=0.3, mu2=0.0, solver=solver)
    assert_matches(beta, -(weight @ space.basis.T / COLUMNS) / (1 / COLUMNS + 0.3), "fp64")


def test_oracle_03_without_ridge_it_projects_the_null_space_away():
    hessian, space = make_space()
    weight = make_weight()
    result = absorb(weight, hessian, space, tau=math.inf, mu1=0.0, mu2=0.0, solver="primal")
    assert_matches(result.weight, weight - weight @ space.basis.T @ space.basis, "fp64")


@pytest.mark.parametrize("solver", SOLVERS)
def test_oracle_04_zero_temperature_shrinks_the_peak_only(solver):
    hessian, space = make_space()
    weight = make_weight()
    mu1 = 0.05
    result = absorb(weight, hessian, space, tau=1e-5, mu1=mu1, mu2=0.0, solver=solver)
    rows, peak = torch.arange(ROWS), weight.abs().argmax(1)
    columns = space.basis.T[peak]  # n_j of each row's peak
    share = columns.square().sum(1)
    assert_matches(result.weight[rows, peak], weight[rows, peak] * mu1 / (mu1 + share), "fp64")
    change = -(weight[rows, peak] / (share + mu1))[:, None] * (columns @ space.basis)
    assert_matches(result.weight - weight, change, "fp64")


def test_oracle_05_a_larger_ridge_changes_less():
    hessian, space = make_space()
    weight = make_weight()
    weights = peak_weights(weight, 0.1)
    norms = torch.stack(
        [
            solve_absorption(weight, weights, space.basis, mu1=mu1, mu2=1.0).norm(dim=1)
            for mu1 in (1e-3, 1e-2, 0.1, 1.0, 1e3, 1e12)
        ]
    )
    assert (norms.diff(dim=0) < 0).all()
    assert_vanishes(norms[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_oracle_05_gamma_zero_is_a_no_op(dtype):
    hessian, space = make_space(gamma=0.0)
    weight = make_weight().to(dtype)
    result = absorb(weight, hessian, space)
    assert result.null_rank == 0
    assert result.range_ratio == 1.0
    assert_matches(result.weight.to(dtype), weight, "exact")
    assert_matches(result.drift, torch.zeros_like(result.drift), "exact")


@pytest.mark.parametrize("solver", SOLVERS)
def test_oracle_06_the_solution_is_the_minimum(solver):
    _, space = make_space()
    weight = make_weight()
    weights = peak_weights(weight, 0.1)
    settings = {"mu1": 0.05, "mu2": 0.7}
    beta = solve_absorption(weight, weights, space.basis, **settings, solver=solver).requires_grad_()
    value = objective(beta, weight, weights, space.basis, **settings)
    (gradient,) = torch.autograd.grad(value.sum(), beta)
    assert_vanishes(gradient)
    assert (value < objective(torch.zeros_like(beta), weight, weights, space.basis, **settings)).all()


def test_oracle_06_nothing_moves_when_the_peaks_are_orthogonal_to_the_null_space():
    basis = torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64) / math.sqrt(2)
    weight = torch.tensor([[2.0, 2.0, 5.0]], dtype=torch.float64)  # equal weights, so rho = 0
    beta = solve_absorption(weight, peak_weights(weight, 0.1), basis, mu1=0.1, mu2=1.0)
    assert_vanishes(beta)


@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("mu2", [0.0, 1.0, 10.0])
def test_oracle_07_all_solvers_agree(tau, mu2):
    _, space = make_space()
    weight = make_weight()
    weights = peak_weights(weight, tau)
    primal, *others = (
        solve_absorption(weight, weights, space.basis, mu1=0.1, mu2=mu2, solver=solver)
        for solver in (*SOLVERS, "auto")
    )
    for other in others:
        assert_matches(other, primal, "fp64")


def test_oracle_07_large_layers_are_cut_into_rows(monkeypatch):
    _, space = make_space()
    weight = make_weight()
    weights = peak_weights(weight, 0.1)
    whole = [solve_absorption(weight, weights, space.basis, mu1=0.1, mu2=1.0, solver=solver) for solver in SOLVERS]
    monkeypatch.setattr("hf_ext.quantizers.osaq.functional._CHUNK_ELEMENTS", 1)
    for solver, expected in zip(SOLVERS, whole, strict=True):
        beta = solve_absorption(weight, weights, space.basis, mu1=0.1, mu2=1.0, solver=solver)
        assert_matches(beta, expected, "fp64")


def test_oracle_07_invariances():
    hessian, space = make_space()
    weight = make_weight()
    expected = absorb(weight, hessian, space)
    rank = expected.null_rank
    signs = torch.where(torch.arange(rank) % 2 == 0, 1.0, -1.0).double()
    flipped = NullSpace(signs[:, None] * space.basis, space.eigenvalues)
    assert_matches(absorb(weight, hessian, flipped).weight, expected.weight, "fp64")
    rotation = torch.linalg.qr(make_weight(5, rank, rank)).Q
    rotated = NullSpace(rotation @ space.basis, space.eigenvalues)
    assert_matches(absorb(weight, hessian, rotated).weight, expected.weight, "fp64")
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    assert_matches(absorb(weight[order], hessian, space).weight, expected.weight[order], "fp64")
    scaled = absorb(1e-3 * weight, 50 * hessian, null_space(50 * hessian, 1e-2))
    assert_matches(scaled.weight, 1e-3 * expected.weight, "fp64")
    assert_matches(scaled.drift, expected.drift, "fp64")


def test_oracle_08_mu2_keeps_the_sum_of_each_row():
    _, space = make_space()
    weight = make_weight()
    weights = peak_weights(weight, 0.1)
    translation = space.basis.sum(1)

    def sums(mu2):
        beta = solve_absorption(weight, weights, space.basis, mu1=0.1, mu2=mu2)
        assert_vanishes(beta @ translation - (beta @ space.basis).sum(1))
        return (beta @ space.basis).sum(1)

    free = sums(0.0)
    systems = (space.basis * weights[:, None, :]) @ space.basis.T + 0.1 * torch.eye(len(translation)).double()
    stiffness = torch.linalg.solve(systems, translation.expand(ROWS, -1)) @ translation
    for mu2 in (1e-4, 1e-2, 1.0, 100.0):
        assert_vanishes(sums(mu2) - free / (1 + mu2 * stiffness))


def test_oracle_08_mu2_does_nothing_where_the_basis_sums_to_zero():
    basis = torch.linalg.qr(make_weight(3, COLUMNS, 6)).Q
    basis = torch.linalg.qr(basis - basis.mean(0)).Q.T.contiguous()
    weight = make_weight()
    weights = peak_weights(weight, 0.1)
    free, pinned = (solve_absorption(weight, weights, basis, mu1=0.1, mu2=mu2) for mu2 in (0.0, 100.0))
    assert_matches(pinned, free, "fp64")


def test_oracle_09_a_whole_null_space_collapses_the_weight_and_is_refused():
    hessian, _ = make_space()
    everything = NullSpace(torch.eye(COLUMNS, dtype=torch.float64), torch.linalg.eigvalsh(hessian))
    collapsed = absorb(make_weight(), hessian, everything, tau=1.0, mu1=0.0, mu2=0.0, solver="primal")
    assert_vanishes(collapsed.weight)
    for ratio in (1.0, 1.5, -0.1):
        with pytest.raises(ValueError, match="max_null_ratio is"):
            null_space(hessian, 1e-2, max_null_ratio=ratio)
    assert null_space(hessian, 1.0, max_null_ratio=0.5).basis.shape == (COLUMNS // 2, COLUMNS)


@pytest.mark.parametrize(("mu1", "expected"), [(0.0, [0.0, 5.0]), (0.5, [2.0, 3.0])])
def test_oracle_10_two_weights(mu1, expected):
    basis = torch.tensor([[1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    weight = torch.tensor([[4.0, 1.0]], dtype=torch.float64)
    for mu2 in (0.0, 10.0):
        beta = solve_absorption(weight, peak_weights(weight, 1e-4), basis, mu1=mu1, mu2=mu2, solver="primal")
        assert_matches(weight + beta @ basis, torch.tensor([expected], dtype=torch.float64), "fp64")


def test_oracle_11_layers_that_share_an_input_share_its_null_space():
    hessian, space = make_space()
    layers = [make_weight(seed, rows) for seed, rows in ((0, 12), (1, 4), (2, 4))]
    together = absorb(torch.cat(layers), hessian, space).weight.split([12, 4, 4])
    for layer, expected in zip(layers, together, strict=True):
        own = absorb(layer, hessian, null_space(hessian, 1e-2)).weight
        assert_matches(own, expected, "fp64")


def test_k_rules_on_a_known_spectrum():
    hessian = torch.diag(torch.tensor([6.0, 1.0, 2.0, 1.0], dtype=torch.float64))

    def rank(gamma, k_rule):
        return null_space(hessian, gamma, k_rule=k_rule, max_null_ratio=0.99).basis.shape[0]

    assert [rank(gamma, "max") for gamma in (0.0, 0.05, 0.25, 0.45)] == [0, 0, 2, 3]
    assert [rank(gamma, "min") for gamma in (0.0, 0.05, 0.25, 0.35)] == [0, 1, 3, 3]


def test_a_dead_input_is_one_null_direction():
    inputs = make_inputs()
    inputs[:, 7] = 0
    hessian = second_moment(inputs)
    space = null_space(hessian, 1e-12)
    assert_vanishes(space.basis.abs() - torch.eye(COLUMNS, dtype=torch.float64)[7:8])
    weight = make_weight()
    result = absorb(weight, hessian, space, mu2=0.0)
    assert_vanishes(result.drift)
    assert_vanishes((result.weight - weight) @ inputs.T)
    assert (result.weight[:, 7].abs() < weight[:, 7].abs()).all()


def test_an_all_zero_hessian_changes_nothing():
    zeros = torch.zeros(COLUMNS, COLUMNS, dtype=torch.float64)
    weight = make_weight()
    assert_matches(absorb(weight, zeros, null_space(zeros, 1e-2)).weight, weight, "exact")


@pytest.mark.parametrize("solver", SOLVERS)
def test_rows_of_zeros_stay_zero_and_finite(solver):
    hessian, space = make_space()
    weight = make_weight()
    weight[[0, 5]] = 0
    result = absorb(weight, hessian, space, solver=solver)
    assert_matches(result.weight[[0, 5]], weight[[0, 5]], "exact")
    assert_matches(result.drift[[0, 5]], torch.zeros(2, dtype=torch.float64), "exact")
    assert result.weight.isfinite().all() and math.isfinite(result.range_ratio)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(value):
    hessian, space = make_space()
    weight = make_weight()
    weight[3, 3] = value
    with pytest.raises(ValueError, match="the weight has values that are not finite"):
        absorb(weight, hessian, space)
    hessian[3, 3] = value
    with pytest.raises(ValueError, match="the Hessian has values that are not finite"):
        null_space(hessian, 1e-2)


def test_unknown_choices_are_refused():
    hessian, space = make_space()
    with pytest.raises(ValueError, match="k_rule is 'both'"):
        null_space(hessian, 1e-2, k_rule="both")
    with pytest.raises(ValueError, match="gamma is 2"):
        null_space(hessian, 2)
    with pytest.raises(ValueError, match="solver is 'lu'"):
        absorb(make_weight(), hessian, space, solver="lu")


def test_peak_weights_of_groups_are_those_of_each_group():
    weight = make_weight()
    grouped = peak_weights(weight, 0.1, group_size=10)  # 10, 10 and a ragged 4
    parts = [peak_weights(part, 0.1) / 3 for part in weight.split(10, dim=1)]
    assert_matches(grouped, torch.cat(parts, dim=1), "fp64")
    assert_matches(grouped.sum(1), torch.ones(ROWS, dtype=torch.float64), "fp64")


def test_the_guard_bounds_drift_and_range():
    hessian, space = make_space(gamma=0.1)
    weight = make_weight()
    plain = absorb(weight, hessian, space, mu1=1e-3)
    limit = plain.drift.median().item()
    guarded = absorb(weight, hessian, space, mu1=1e-3, drift_tol=limit)
    span = weight.amax(1) - weight.amin(1)
    assert plain.drift.max() > limit and ((plain.weight.amax(1) - plain.weight.amin(1)) > span).any()
    assert (guarded.drift <= limit).all()
    assert (guarded.weight.amax(1) - guarded.weight.amin(1) <= span).all()
    change = guarded.weight - weight
    energy = ((change @ hessian) * change).sum(1)
    assert_matches(guarded.drift, energy / ((weight @ hessian) * weight).sum(1), "fp64")
    steps = change.norm(dim=1) / (plain.weight - weight).norm(dim=1)
    nearest = torch.tensor([0, 0.25, 0.5, 1], dtype=torch.float64)
    assert_matches(steps, nearest[(steps[:, None] - nearest).abs().argmin(1)], "fp64")


def test_bfloat16_weights_are_solved_in_float32():
    hessian, space = make_space()
    weight = make_weight().bfloat16()
    result = absorb(weight, hessian, space)
    assert result.weight.dtype == torch.float32
    assert_matches(result.weight, absorb(weight.double(), hessian, space).weight.float(), "fp32")


def test_three_bit_rows_lose_a_quarter_less():
    """The paper's claim on a layer with rare large weights and inputs of low rank plus noise."""
    columns = 128
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2048, columns // 4, generator=generator).double()
    inputs = inputs @ torch.randn(columns // 4, columns, generator=generator).double()
    inputs = inputs + 0.05 * torch.randn(2048, columns, generator=generator).double()
    weight = torch.randn(256, columns, generator=generator).double()
    weight = torch.where(torch.rand(256, columns, generator=generator) < 0.01, 8 * weight, weight)
    hessian = second_moment(inputs)
    space = null_space(hessian, 1e-2)

    def error(candidate):
        scale, zero = min_max_grid(candidate, 3)
        codes = round_to_grid(candidate, scale, zero, 3)
        rounded = (codes.double() - zero) * scale
        return ((rounded - weight) @ inputs.T).norm().item()

    plain = error(weight)
    absorbed = error(absorb(weight, hessian, space).weight)
    least_squares = error(absorb(weight, hessian, space, tau=math.inf).weight)
    assert absorbed < 0.75 * plain
    assert absorbed < least_squares
