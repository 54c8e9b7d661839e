"""Grids, rounding to the nearest, GPTQ and coordinate descent."""

import math

import pytest
import torch

from hf_ext.quantizers.rounding import (
    HessianFactorizationError,
    coordinate_descent,
    gptq,
    min_max_grid,
    round_to_grid,
)
from tests.numerics import assert_matches


def make_weight(rows=8, columns=64, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def make_hessian(columns=64, tokens=512, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(tokens, columns, generator=generator, dtype=torch.float64)
    inputs = inputs @ torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    return (inputs.T @ inputs / tokens).float()


def per_column(grid, columns, group_size):
    width = columns if group_size == -1 else group_size
    return grid.double()[:, torch.arange(columns) // width]


def restore(codes, scale, zero, group_size):
    scale, zero = (per_column(grid, codes.shape[1], group_size) for grid in (scale, zero))
    return (codes.double() - zero) * scale


def output_error(restored, weight, hessian):
    difference = restored - weight.double()
    return ((difference @ hessian.double()) * difference).sum(1)


def rtn(weight, bits, group_size):
    scale, zero = min_max_grid(weight, bits, group_size)
    return restore(round_to_grid(weight, scale, zero, bits, group_size), scale, zero, group_size)


def naive_gptq(weight, hessian, bits, group_size, damp_percent):
    """The definition: after each column, the rest takes up the error through the inverse of what is left."""
    work, hessian = weight.double(), hessian.double()
    columns = weight.shape[1]
    hessian = hessian + damp_percent * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    width = columns if group_size == -1 else group_size
    restored = torch.empty_like(work)
    for column in range(columns):
        if column % width == 0:
            scale, zero = (grid.double()[:, 0] for grid in min_max_grid(work[:, column : column + width], bits))
        code = (torch.round(work[:, column] / scale) + zero).clamp(0, 2**bits - 1)
        restored[:, column] = (code - zero) * scale
        inverse = torch.linalg.inv(hessian[column:, column:])
        error = (work[:, column] - restored[:, column]) / inverse[0, 0]
        work[:, column:] -= torch.outer(error, inverse[0])
    return restored


# --- grids and rounding to the nearest


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [-1, 16, 24, 100])
def test_rounding_errs_by_at_most_half_a_step(bits, group_size):
    weight = make_weight() + 0.3
    scale, zero = min_max_grid(weight, bits, group_size)
    width = 64 if group_size == -1 else group_size
    assert scale.shape == zero.shape == (8, math.ceil(64 / width))
    assert scale.dtype == torch.float32 and zero.dtype == torch.uint8
    codes = round_to_grid(weight, scale, zero, bits, group_size)
    assert codes.dtype == torch.uint8 and codes.max() <= 2**bits - 1
    error = (restore(codes, scale, zero, group_size) - weight.double()).abs()
    # zero is rounded too, so an end of the range may lie half a step outside the grid
    assert (error <= per_column(scale, 64, group_size) * (0.5 + 1e-5)).all()


def test_a_weight_on_the_grid_is_kept():
    codes = torch.tensor([[0, 1, 5, 7, 3, 0, 7, 2]], dtype=torch.uint8)
    weight = (codes.float() - 3) * 0.25
    scale, zero = min_max_grid(weight, 3)
    assert_matches(scale, torch.tensor([[0.25]]), "exact")
    assert_matches(zero, torch.tensor([[3]], dtype=torch.uint8), "exact")
    assert_matches(round_to_grid(weight, scale, zero, 3), codes, "exact")


@pytest.mark.parametrize("sign", [1, -1])
def test_the_range_includes_zero(sign):
    weight = sign * (make_weight().abs() + 5)
    scale, zero = min_max_grid(weight, 3)
    assert_matches(zero, torch.full_like(zero, 0 if sign > 0 else 7), "exact")
    assert_matches(scale[:, 0], weight.abs().amax(1) / 7, "fp32")


@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-42])
def test_empty_and_tiny_groups_are_finite(value):
    weight = make_weight()
    weight[2] = value
    weight[3, 16:32] = value
    scale, zero = min_max_grid(weight, 3, 16)
    assert scale.isfinite().all() and (scale > 0).all()
    assert_matches(scale[2], torch.ones(4), "exact")
    restored = restore(round_to_grid(weight, scale, zero, 3, 16), scale, zero, 16)
    assert_matches(restored[2], torch.zeros(64, dtype=torch.float64), "exact")
    assert_matches(restored[3, 16:32], torch.zeros(16, dtype=torch.float64), "exact")


def test_huge_weights_do_not_overflow():
    weight = torch.tensor([[3e38, -3e38, 0.0, 1e38]])
    scale, zero = min_max_grid(weight, 4)
    assert scale.isfinite().all()
    assert restore(round_to_grid(weight, scale, zero, 4), scale, zero, -1).isfinite().all()


@pytest.mark.parametrize("group_size", [0, -2])
def test_impossible_group_sizes_are_refused(group_size):
    with pytest.raises(ValueError, match=f"group_size is {group_size}"):
        min_max_grid(make_weight(), 3, group_size)


# --- GPTQ


@pytest.mark.parametrize("group_size", [-1, 8, 12, 16, 24, 48])
def test_gptq_matches_the_definition(group_size):
    weight, hessian = make_weight(), make_hessian()
    result = gptq(weight, hessian, 3, group_size, block_size=16)
    restored = restore(result.codes, result.scale, result.zero, group_size)
    assert_matches(restored.float(), naive_gptq(weight, hessian, 3, group_size, 0.01).float(), "fp32")
    assert result.damp_percent_used == 0.01


@pytest.mark.parametrize("group_size", [-1, 16])
def test_gptq_in_order_of_activity_matches_the_definition(group_size):
    weight, hessian = make_weight(), make_hessian()
    result = gptq(weight, hessian, 3, group_size, desc_act=True, block_size=16)
    scale, zero = min_max_grid(weight, 3, group_size)
    assert_matches(result.scale, scale, "exact")
    assert_matches(result.zero, zero, "exact")
    order = hessian.diagonal().argsort(descending=True)
    step, offset = per_column(scale, 64, group_size)[:, order], per_column(zero, 64, group_size)[:, order]
    work = weight.double()[:, order]
    left = hessian.double()[order][:, order]
    left += 0.01 * left.diagonal().mean() * torch.eye(64, dtype=torch.float64)
    expected = torch.empty_like(work)
    for column in range(64):
        code = (torch.round(work[:, column] / step[:, column]) + offset[:, column]).clamp(0, 7)
        expected[:, order[column]] = (code - offset[:, column]) * step[:, column]
        inverse = torch.linalg.inv(left[column:, column:])
        error = (work[:, column] - expected[:, order[column]]) / inverse[0, 0]
        work[:, column:] -= torch.outer(error, inverse[0])
    assert_matches(restore(result.codes, result.scale, result.zero, group_size), expected, "fp64")


@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("group_size", [-1, 24])
def test_gptq_beats_rounding_to_the_nearest(desc_act, group_size):
    weight, hessian = make_weight(rows=64), make_hessian()
    result = gptq(weight, hessian, 3, group_size, desc_act=desc_act)
    ours = output_error(restore(result.codes, result.scale, result.zero, group_size), weight, hessian).sum()
    assert ours < 0.7 * output_error(rtn(weight, 3, group_size), weight, hessian).sum()


@pytest.mark.parametrize("group_size", [-1, 24])
def test_gptq_on_uncorrelated_inputs_is_rounding_to_the_nearest(group_size):
    weight = make_weight()
    result = gptq(weight, torch.eye(64), 3, group_size)
    restored = restore(result.codes, result.scale, result.zero, group_size)
    assert_matches(restored, rtn(weight, 3, group_size), "exact")


def test_gptq_does_not_depend_on_the_scale_of_the_hessian():
    weight, hessian = make_weight(), make_hessian()
    expected = gptq(weight, hessian, 3)
    for factor in (2.0**-20, 2.0**20):
        assert_matches(gptq(weight, factor * hessian, 3).codes, expected.codes, "exact")


@pytest.mark.parametrize("desc_act", [False, True])
def test_a_dead_input_gets_weight_zero_and_leaves_the_others_alone(desc_act):
    weight, hessian = make_weight(), make_hessian()
    dead = torch.zeros(64, dtype=torch.bool)
    dead[[0, 9, 40]] = True
    hessian[dead] = 0
    hessian[:, dead] = 0
    result = gptq(weight, hessian, 3, desc_act=desc_act)
    restored = restore(result.codes, result.scale, result.zero, -1)
    assert_matches(restored[:, dead], torch.zeros(8, 3, dtype=torch.float64), "exact")
    alive = gptq(weight[:, ~dead], hessian[~dead][:, ~dead], 3, desc_act=desc_act)
    assert_matches(result.codes[:, ~dead], alive.codes, "exact")


def test_fewer_tokens_than_columns():
    inputs = torch.randn(10, 64, generator=torch.Generator().manual_seed(3))
    weight, hessian = make_weight(), inputs.T @ inputs / 10
    result = gptq(weight, hessian, 3)
    restored = restore(result.codes, result.scale, result.zero, -1)
    assert output_error(restored, weight, hessian).sum() < output_error(rtn(weight, 3, -1), weight, hessian).sum()


def test_an_underflowing_diagonal_stays_finite():
    hessian = make_hessian()
    hessian[5] = 0
    hessian[:, 5] = 0
    hessian[5, 5] = 1e-42
    result = gptq(make_weight(), hessian, 3)
    assert restore(result.codes, result.scale, result.zero, -1).isfinite().all()


def test_damping_grows_until_the_hessian_factors():
    hessian = make_hessian()
    shift = torch.linalg.eigvalsh(hessian)[0] + 0.05 * hessian.diagonal().mean()
    result = gptq(make_weight(), hessian - shift * torch.eye(64), 3)
    assert 0.05 < result.damp_percent_used <= 0.1 * (1 + 1e-6)
    undamped = torch.zeros(64, 64).fill_diagonal_(1.0)
    undamped[0, 1] = undamped[1, 0] = 1.0  # singular
    assert gptq(make_weight(), undamped, 3, damp_percent=0.0).damp_percent_used == 0.01


def test_a_hessian_that_cannot_factor_is_an_error():
    hessian = torch.zeros(64, 64)
    hessian[0, 1] = hessian[1, 0] = 1e9
    hessian.fill_diagonal_(1e-3)
    with pytest.raises(HessianFactorizationError, match="64 x 64 Hessian did not factor"):
        gptq(make_weight(), hessian, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(value):
    weight, hessian = make_weight(), make_hessian()
    weight[1, 2] = value
    with pytest.raises(ValueError, match="the weight has 1 values of 512 that are not finite"):
        gptq(weight, hessian, 3)
    with pytest.raises(ValueError, match="the weight has 1 values"):
        min_max_grid(weight, 3)
    hessian[1, 1] = value
    with pytest.raises(ValueError, match="the Hessian has 1 values of 4096 that are not finite"):
        gptq(make_weight(), hessian, 3)


def test_a_hessian_of_another_layer_is_refused():
    with pytest.raises(ValueError, match=r"the Hessian is \[32, 32\] but the weight \[8, 64\] needs \[64, 64\]"):
        gptq(make_weight(), make_hessian(32), 3)


@pytest.mark.parametrize("rows", [1, 3, 65])
@pytest.mark.parametrize("columns", [1, 7, 130])
def test_any_shape_and_no_input_is_changed(rows, columns):
    weight, hessian = make_weight(rows, columns), make_hessian(columns)
    copies = weight.clone(), hessian.clone()
    for desc_act in (False, True):
        result = gptq(weight, hessian, 2, 8, desc_act=desc_act)
        codes = coordinate_descent(weight, result.codes, result.scale, result.zero, hessian, 2, 8)
        assert codes.shape == result.codes.shape == (rows, columns)
        assert restore(codes, result.scale, result.zero, 8).isfinite().all()
    assert_matches(weight, copies[0], "exact")
    assert_matches(hessian, copies[1], "exact")


# --- coordinate descent


@pytest.mark.parametrize("start", ["rtn", "gptq"])
@pytest.mark.parametrize("group_size", [-1, 24])
def test_coordinate_descent_never_raises_the_error(start, group_size):
    weight, hessian = make_weight(rows=64), make_hessian()
    if start == "gptq":
        result = gptq(weight, hessian, 2, group_size)
        codes, scale, zero = result.codes, result.scale, result.zero
    else:
        scale, zero = min_max_grid(weight, 2, group_size)
        codes = round_to_grid(weight, scale, zero, 2, group_size)
    errors = [output_error(restore(codes, scale, zero, group_size), weight, hessian)]
    for _ in range(4):
        codes = coordinate_descent(weight, codes, scale, zero, hessian, 2, group_size, sweeps=1)
        errors.append(output_error(restore(codes, scale, zero, group_size), weight, hessian))
    assert (torch.stack(errors).diff(dim=0) <= 0).all()
    assert errors[-1].sum() < 0.98 * errors[0].sum()


def test_coordinate_descent_ends_where_no_single_code_can_improve():
    weight, hessian = make_weight(rows=4, columns=20), make_hessian(20)
    scale, zero = min_max_grid(weight, 2)
    codes = round_to_grid(weight, scale, zero, 2)
    codes = coordinate_descent(weight, codes, scale, zero, hessian, 2, sweeps=100)
    best = output_error(restore(codes, scale, zero, -1), weight, hessian)
    for column in range(20):
        for value in range(4):
            other = codes.clone()
            other[:, column] = value
            assert (output_error(restore(other, scale, zero, -1), weight, hessian) >= best).all()


def test_coordinate_descent_does_not_depend_on_the_block_size():
    weight, hessian = make_weight(rows=16), make_hessian()
    scale, zero = min_max_grid(weight, 2)
    codes = round_to_grid(weight, scale, zero, 2)
    one, other = (
        coordinate_descent(weight, codes, scale, zero, hessian, 2, sweeps=3, block_size=size) for size in (8, 64)
    )
    assert_matches(one, other, "exact")


def test_coordinate_descent_is_exact_on_uncorrelated_inputs_and_skips_dead_ones():
    weight = make_weight()
    scale, zero = min_max_grid(weight, 3, 16)
    nearest = round_to_grid(weight, scale, zero, 3, 16)
    start = torch.zeros_like(nearest)
    hessian = torch.eye(64)
    hessian[4, 4] = 0
    codes = coordinate_descent(weight, start, scale, zero, hessian, 3, 16)
    nearest[:, 4] = 0
    assert_matches(codes, nearest, "exact")
