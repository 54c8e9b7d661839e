"""The equations of CAT-Q, by the numbers of their oracles."""

import math

import pytest
import torch

from hf_ext.quantizers.catq import functional
from hf_ext.quantizers.catq.functional import (
    SCALE_EPSILON,
    huber_delta,
    modulate,
    sharpness,
    soften,
    ternarize,
    windows,
)
from tests.numerics import assert_matches


GROUP_SIZE = 8


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def zeros(out_features, groups):
    return [torch.zeros(out_features, groups, 1, dtype=torch.float64) for _ in range(3)]


def grid_of(weight, factors=None, group_size=GROUP_SIZE, **options):
    factors = factors or zeros(weight.shape[0], weight.shape[1] // group_size)
    return modulate(weight, *factors, group_size=group_size, **options)


def ternary(grid):
    return grid.scale * ternarize(grid.normalized, grid.threshold)


X = torch.linspace(-3, 3, 601, dtype=torch.float64)[None, None]
HALF = torch.full((1, 1, 1), 0.5, dtype=torch.float64)


def test_oracle_1_soft_ternary_goes_from_the_identity_to_the_ternary_values():
    assert (soften(X, HALF, 1e-4) - X).abs().max() < 1e-6
    off_ties = (X.abs() - 0.5).abs() > 1e-3
    assert_matches(soften(X, HALF, 1e6)[off_ties], ternarize(X, HALF)[off_ties], "fp64")


@pytest.mark.parametrize("s", [0.625, 5.0, 30.0])
def test_oracle_1_soft_ternary_is_odd_and_half_at_the_threshold(s):
    assert_matches(soften(-X, HALF, s), -soften(X, HALF, s), "exact")
    assert soften(torch.zeros_like(HALF), HALF, s).item() == 0
    assert_matches(soften(HALF, HALF, s), HALF, "fp64")
    other = torch.full_like(HALF, 0.8)
    expected = torch.full_like(HALF, math.tanh(2 * s * 0.8) / (2 * math.tanh(s)))
    assert_matches(soften(other, other, s), expected, "fp64")


def test_oracle_1_soft_ternary_exceeds_one_by_the_known_amount():
    far = torch.full_like(HALF, 1e3)
    assert_matches(soften(far, HALF, 4.95), torch.full_like(HALF, 1 / math.tanh(4.95)), "fp64")


def test_oracle_2_without_factors_it_is_centred_absmean_ternarization():
    weight = draw(5, 24)
    grouped = weight.unflatten(1, (-1, GROUP_SIZE))
    mean = grouped.mean(-1, keepdim=True)
    scale = (grouped - mean).abs().mean(-1, keepdim=True) + SCALE_EPSILON
    expected = torch.clamp(torch.round((grouped - mean) / scale), -1, 1) * scale
    assert_matches(ternary(grid_of(weight)), expected, "fp64")


def test_oracle_2_the_official_values():
    weight = torch.tensor([[1.0, 2.0, 3.0, 10.0]], dtype=torch.float64)
    plain, raw = grid_of(weight, group_size=4), grid_of(weight, group_size=4, scale_from_raw=True)
    as_row = {"plain": ternary(plain), "mean": ternary(plain) + plain.mean, "raw": ternary(raw) + raw.mean}
    rounded = {name: values.flatten().round(decimals=4).tolist() for name, values in as_row.items()}
    assert rounded == {"plain": [-3, -3, 0, 3], "mean": [1, 1, 4, 7], "raw": [0, 4, 4, 8]}


def test_oracle_3_gaussian_weights():
    """Shares and errors of a normal distribution, known in closed form, within what a million draws allow."""
    weight = draw(8, 131072)
    grid = grid_of(weight, group_size=131072)
    values = ternarize(grid.normalized, grid.threshold)
    assert abs((values != 0).double().mean().item() - 0.68994) < 2e-3

    def error(scale_ratio, threshold):
        wide = ternarize(grid.normalized, torch.full_like(grid.threshold, threshold))
        return ((scale_ratio * grid.scale * wide).flatten(1) - weight).square().mean().item()

    for ratio, threshold, expected in ((1, 0.5, 0.2629), (1.3388, 0.5, 0.2126), (1.534, 0.767, 0.1897)):
        assert abs(error(ratio, threshold) - expected) < 2e-3


def test_oracle_4_the_two_forms_of_the_ternary_values_agree_on_ties_too():
    normalized = torch.cat([X.flatten(), torch.tensor([0.5, -0.5, 1.5, 0.0])]).view(1, 1, -1)
    rounded = torch.clamp(torch.round(normalized * 0.5 / HALF), -1, 1)
    assert_matches(ternarize(normalized, HALF), rounded.double(), "exact")


def test_oracle_4_symmetries():
    weight, factors = draw(4, 16), [draw(4, 2, 1, seed=seed) for seed in (1, 2, 3)]
    grid = grid_of(weight, factors)
    codes = ternarize(grid.normalized, grid.threshold)
    larger = grid_of(weight * 1e5, factors)
    assert_matches(ternarize(larger.normalized, larger.threshold), codes, "exact")
    assert_matches((larger.scale / 1e5).float(), grid.scale.float(), "fp32")
    flipped = grid_of(-weight, [-factors[0], *factors[1:]])
    assert_matches(ternarize(flipped.normalized, flipped.threshold), -codes, "exact")
    shifted = grid_of(weight + 3.0, factors)
    assert_matches(ternarize(shifted.normalized, shifted.threshold), codes, "exact")
    assert_matches(shifted.scale, grid.scale, "fp64")


def test_oracle_5_gradients_of_the_softened_values():
    for s in (0.7, 6.0):
        x, delta = draw(3, 2, GROUP_SIZE).requires_grad_(), (0.5 + draw(3, 2, 1, seed=1).abs()).requires_grad_()
        assert torch.autograd.gradcheck(lambda x, delta, s=s: soften(x, delta, s), (x, delta))


def test_oracle_5_closed_forms_of_the_gradients():
    weight, factors = draw(3, 16), [draw(3, 2, 1, seed=seed).requires_grad_() for seed in (1, 2, 3)]
    s, cotangent = 4.0, draw(3, 2, GROUP_SIZE, seed=4)
    grid = grid_of(weight, factors)
    x, mu, alpha, delta = grid.normalized, grid.mean, grid.scale, grid.threshold
    for tensor in (x, mu, alpha, delta):
        tensor.retain_grad()
    (cotangent * alpha * soften(x, delta, s)).sum().backward()
    with torch.no_grad():
        below, above = (1 - torch.tanh(s * (x + side * delta)) ** 2 for side in (-1, 1))
        slope = s * (below + above) / (2 * math.tanh(s))
        by_mu = (-cotangent * slope).sum(-1, keepdim=True)
        by_alpha = (cotangent * (soften(x, delta, s) - x * slope)).sum(-1, keepdim=True)
        by_delta = (cotangent * alpha * s * (above - below) / (2 * math.tanh(s))).sum(-1, keepdim=True)
        alpha_0 = alpha / (2 * torch.sigmoid(factors[1]))
        d_mu = 2 * torch.sigmoid(factors[0]) - 1
        d_alpha, d_delta = (2 * torch.sigmoid(factor) for factor in factors[1:])
    assert_matches(delta.grad, by_delta, "fp64")
    assert_matches(factors[2].grad, by_delta * 0.5 * d_delta * (1 - d_delta / 2), "fp64")
    assert_matches(factors[1].grad, by_alpha * alpha_0 * d_alpha * (1 - d_alpha / 2), "fp64")
    assert_matches(factors[0].grad, by_mu * alpha_0 * (1 - d_mu**2) / 2, "fp64")


@pytest.mark.parametrize("scale_from_raw", [False, True])
@pytest.mark.parametrize("stage", [(3.0, None), (None, 30.0), (None, None)], ids=["soft", "hard", "straight through"])
def test_oracle_5_the_weight_that_is_trained_has_the_gradients_of_its_equations(monkeypatch, stage, scale_from_raw):
    """Against autograd through the equations, more than one piece, at a threshold that is not the usual one."""
    monkeypatch.setattr(functional, "PIECE", 32)
    tensors = [draw(5, 16), *(draw(5, 2, 1, seed=seed) for seed in (1, 2, 3))]
    options = {"group_size": GROUP_SIZE, "initial_threshold": 0.7, "scale_from_raw": scale_from_raw}
    (sharp, surrogate), cotangent = stage, draw(5, 16, seed=4)

    def equations(weight, *factors):
        grid = modulate(weight, *factors, **options)
        if sharp is not None:
            return (grid.scale * soften(grid.normalized, grid.threshold, sharp)).flatten(1)
        smooth = grid.normalized if surrogate is None else soften(grid.normalized, grid.threshold, surrogate)
        hard = ternarize(grid.normalized, grid.threshold)
        return (grid.scale * (smooth + (hard - smooth).detach())).flatten(1)

    results = []
    for compute in (
        equations,
        lambda *t: functional.ternary_weight(*t, sharpness=sharp, gradient_sharpness=surrogate, **options),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output = compute(*leaves)
        (cotangent * output).sum().backward()
        results.append([output.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_oracle_8_the_published_schedule():
    expected = [(0, 1), (0, 2), (0, 3), (0, 4)]
    expected += [(start, start + 4) for start in range(2, 25, 2)]
    expected += [(25, 28), (26, 28), (27, 28)]
    assert [(window.start, window.stop) for window in windows(28, 4, 2, 4)] == expected
    assert [len(windows(blocks, 4, 2, 4)) for blocks in (28, 30, 36)] == [19, 20, 23]


def test_oracle_8_every_block_is_covered_and_starts_never_go_back():
    """No gap either: a window starts at the latest where the ones before it end."""
    shapes = [
        (length, stride, fill) for length in range(1, 9) for stride in range(1, length + 1) for fill in range(1, 6)
    ]
    for blocks in (*range(1, 16), 30, 31):
        for shape in shapes:
            covered = start = 0
            for window in windows(blocks, *shape):
                assert start <= window.start <= covered and window.start < window.stop <= blocks, (blocks, shape)
                covered, start = max(covered, window.stop), window.start
            assert covered == blocks, (blocks, shape)


def test_oracle_8_time_is_counted_in_epochs():
    sharp = [sharpness(epoch, 60, 30.0, 0.8) for epoch in range(60)]
    assert sharp[0] == 0.625 and sharp[47] == 30.0 and sharp[48:] == [None] * 12
    assert sharpness(0, 5, 30.0, 0.0) is None
    assert sharpness(9, 10, 30.0, 1.0) == 30.0
    assert sharpness(0, 1, 30.0, 0.8) == 30.0  # a single epoch is soft


def test_the_huber_loss_turns_linear_later_from_window_to_window():
    assert [huber_delta(window, 10, 0.1, 1.0) for window in (0, 5)] == [0.1, 0.55]
