"""The equations of LittleBit-2 against closed forms, in float64."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import hf_ext
from hf_ext.quantizers.littlebit2 import functional
from hf_ext.quantizers.littlebit2.functional import (
    BinaryPath,
    SmoothSign,
    StraightThroughSign,
    binary_linear,
    bits_per_weight,
    distillation_loss,
    dual_svid,
    factorize,
    hard_sign,
    joint_itq,
    random_rotation,
    rank_for,
    row_efficiency,
)
from tests.numerics import assert_matches


OUT, IN, RANK = 40, 24, 8


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def heavy_tailed(seed=0, rows=192, columns=128):
    """Singular values that fall as k^-1/2 and singular vectors with a few large entries, as trained weights have."""
    factors = [randn(size, columns, seed=seed + i).pow(3) for i, size in enumerate((rows, columns))]
    return (factors[0] * torch.arange(1, columns + 1, dtype=torch.float64) ** -0.5) @ factors[1].T


def to_dense(paths):
    return sum(path.to_dense() for path in paths)


def relative_error(weight, paths):
    return ((weight - to_dense(paths)).norm() / weight.norm()).item()


def stacked(path):
    return torch.cat([path.U, path.V.T])


def assert_vanishes(value, beside=1.0):
    """`value` is zero to float64 rounding on the scale of `beside`."""
    assert_matches(beside + value, torch.full_like(value, beside), "fp64")


def rotated(vectors, iterations=50, seed=0):
    start = random_rotation(vectors.shape[1], seeded(seed), torch.float64)
    return joint_itq(vectors, iterations, rotation=start)


def test_oracle_01_the_rotation_is_orthogonal_and_keeps_the_product():
    left, right = randn(OUT, RANK), randn(RANK, IN, seed=1)
    rotation = rotated(torch.cat([left, right.T]))
    assert_vanishes(rotation.T @ rotation - torch.eye(RANK, dtype=torch.float64))
    assert_vanishes((left @ rotation) @ (rotation.T @ right) - left @ right)


@pytest.mark.parametrize("seed", range(4))
def test_oracle_01_a_rank_of_one_has_two_rotations(seed):
    assert_matches(rotated(randn(OUT, 1), seed=seed).abs(), torch.ones(1, 1), "fp64")


def test_oracle_01_the_whole_start_keeps_the_product():
    weight = heavy_tailed(rows=OUT, columns=IN)
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    best = (left[:, :RANK] * values[:RANK]) @ right[:RANK]
    for rotation in ("none", "random", "joint_itq"):
        (path,) = factorize(weight, RANK, paths=1, rotation=rotation, generator=seeded())
        assert_vanishes((path.U @ path.V - best) / best.norm())


def test_random_rotations_are_orthogonal_and_as_often_reflections():
    rotations = [random_rotation(RANK, seeded(seed), torch.float64) for seed in range(64)]
    for rotation in rotations:
        assert_vanishes(rotation.T @ rotation - torch.eye(RANK, dtype=torch.float64))
    assert 16 <= sum(bool(rotation.det() < 0) for rotation in rotations) <= 48
    assert 16 <= sum(bool(rotation[0, 0] < 0) for rotation in rotations) <= 48


def test_oracle_02_the_l1_norm_never_falls():
    vectors = torch.cat([heavy_tailed()[:, :16], randn(64, 16)])
    norms = [(vectors @ rotated(vectors, iterations)).abs().sum() for iterations in range(60)]
    assert all(after >= before * (1 - 1e-12) for before, after in zip(norms, norms[1:], strict=False))
    assert norms[-1] > 1.05 * norms[0]


def test_oracle_02_neither_scale_nor_the_sign_of_a_row_counts():
    vectors, start = randn(OUT, RANK), random_rotation(RANK, seeded(), torch.float64)
    expected = joint_itq(vectors, rotation=start)
    flips = hard_sign(randn(OUT, 1, seed=3))
    for other in (vectors * 1e-4, vectors * 37, vectors * flips):
        assert_vanishes(joint_itq(other, rotation=start) - expected)


def test_oracle_02_permuted_columns_permute_the_rows_of_the_rotation():
    vectors, start = randn(OUT, RANK), random_rotation(RANK, seeded(), torch.float64)
    order = torch.randperm(RANK, generator=seeded())
    permuted = joint_itq(vectors[:, order], rotation=start[order])
    assert_vanishes(permuted - joint_itq(vectors, rotation=start)[order])


@pytest.mark.parametrize("rotation", ["none", "random", "joint_itq"])
def test_oracle_03_a_rank_one_weight_is_exact(rotation):
    """Whatever the signs, also as `diag(h) B1 diag(l) B2 diag(g)` of rank 1, which is the same."""
    weight = torch.outer(randn(OUT), randn(IN, seed=1))
    (path,) = factorize(weight, 1, paths=1, rotation=rotation, generator=seeded())
    assert_matches(path.to_dense(), weight, "fp64")


def test_oracle_03_what_is_exact_leaves_a_residual_of_nothing():
    weight = torch.outer(randn(OUT), randn(IN, seed=1))
    paths = factorize(weight, 1, paths=2, generator=seeded())
    assert_matches(to_dense(paths), weight, "fp64")


def test_oracle_04_sign_vectors_stay_where_they_are():
    start = random_rotation(RANK, seeded(), torch.float64)
    sizes = randn(OUT, 1).abs() + 0.1
    vectors = (hard_sign(randn(OUT, RANK)) * sizes) @ start.T
    rotation = joint_itq(vectors, 1, rotation=start)
    assert_vanishes(rotation - start)
    assert_matches(row_efficiency(vectors @ rotation), torch.ones(OUT), "fp64")


# (out, in, bits, paths, rank)
RANKS = [
    *((4096, 4096, bits, 2, rank) for bits, rank in ((1.0, 1000), (0.55, 544), (0.3, 288), (0.1, 80))),
    *((4096, 11008, bits, 2, rank) for bits, rank in ((1.0, 1472), (0.55, 800), (0.3, 424), (0.1, 128))),
    *((4096, 4096, bits, 1, rank) for bits, rank in ((1.0, 2024), (0.55, 1104), (0.3, 592), (0.1, 184))),
    *((4096, 11008, bits, 1, rank) for bits, rank in ((1.0, 2960), (0.55, 1624), (0.3, 872), (0.1, 280))),
    (576, 576, 0.1, 2, 8),
]


@pytest.mark.parametrize("out_features, in_features, bits, paths, rank", RANKS)
def test_oracle_05_ranks(out_features, in_features, bits, paths, rank):
    assert rank_for(out_features, in_features, bits, paths) == rank
    assert rank_for(in_features, out_features, bits, paths) == rank
    if rank > 8:
        actual = bits_per_weight(out_features, in_features, rank, paths)
        assert actual <= bits < bits_per_weight(out_features, in_features, rank + 8, paths)


def test_oracle_05_bits():
    expected = (2 * 1000 * (8192 + 16) + 32 * 8192) / 2**24
    assert bits_per_weight(4096, 4096, 1000, 2) == expected == pytest.approx(0.994095, abs=5e-7)
    assert bits_per_weight(576, 576, 8, 2) == pytest.approx(0.1674, abs=5e-5)


def test_oracle_05_factor_multiple_and_minimum():
    assert rank_for(1024, 4096, 0.55, 2, factor=2.0) == 2 * rank_for(1024, 4096, 0.55, 2, multiple=1) // 8 * 8
    assert rank_for(4096, 4096, 0.55, 2, multiple=32) == 544 and rank_for(4096, 4096, 0.3, 2, multiple=32) == 288
    assert rank_for(4096, 4096, 0.1, 2, multiple=32) == 64
    assert rank_for(8, 8, 0.1, 2, minimum=4) == 4, "the scales alone are over the budget"


def test_oracle_08_smooth_sign():
    values = torch.tensor([0.0, -0.0, 0.03, -0.03, 1e-9, -1e-9], dtype=torch.float64, requires_grad=True)
    signs = SmoothSign.apply(values, 100.0)
    assert_matches(signs, torch.tensor([1.0, 1, 1, -1, 1, -1]), "fp64")
    signs.sum().backward()
    assert_matches(values.grad[:2], torch.full((2,), 100.0), "fp64")
    assert_matches(values.grad[2:4], torch.full((2,), 100 / math.cosh(3) ** 2, dtype=torch.float64), "fp64")
    assert values.grad[2].item() == pytest.approx(0.98, abs=0.01)


def test_oracle_08_straight_through_sign():
    values = torch.tensor([0.0, -0.0, 0.999, -0.999, 1.0, -1.0, 3.0], dtype=torch.float64, requires_grad=True)
    signs = StraightThroughSign.apply(values)
    assert_matches(signs, torch.tensor([1.0, 1, 1, -1, 1, -1, 1]), "fp64")
    signs.backward(torch.arange(1.0, 8.0, dtype=torch.float64))
    assert_matches(values.grad, torch.tensor([1.0, 2, 3, 4, 0, 0, 0]), "fp64")


@pytest.mark.parametrize("paths", [1, 2])
@pytest.mark.parametrize("bits", [1.0, 0.55])
def test_oracle_09_rotations_order_the_errors(bits, paths):
    weight = heavy_tailed()
    rank = rank_for(*weight.shape, bits, paths)
    errors = {
        rotation: relative_error(weight, factorize(weight, rank, paths=paths, rotation=rotation, generator=seeded()))
        for rotation in ("joint_itq", "random", "none")
    }
    assert errors["joint_itq"] < errors["random"] < errors["none"]


def test_oracle_09_a_random_rotation_makes_rows_normal():
    weight = heavy_tailed(rows=384, columns=256)
    found = {
        rotation: row_efficiency(
            stacked(factorize(weight, 112, paths=1, rotation=rotation, generator=seeded())[0])
        ).mean()
        for rotation in ("joint_itq", "random", "none")
    }
    assert abs(found["random"] - 2 / math.pi) < 0.01
    assert found["none"] < found["random"] < found["joint_itq"]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [1.0, 0.55, 0.3])
def test_oracle_09_on_trained_weights(bits):
    model = AutoModelForCausalLM.from_pretrained(hf_ext.demo_model(), dtype=torch.float32)
    block = model.model.layers[10]
    for linear in (block.self_attn.q_proj, block.self_attn.v_proj, block.mlp.gate_proj, block.mlp.down_proj):
        weight = linear.weight.detach()
        rank = rank_for(*weight.shape, bits, 1)
        errors = {}
        for rotation in ("joint_itq", "random", "none"):
            paths = factorize(weight, rank, paths=1, rotation=rotation, generator=seeded())
            errors[rotation] = relative_error(weight, paths)
            if rotation == "random" and rank >= 64:
                assert abs(row_efficiency(stacked(paths[0])).mean() - 2 / math.pi) < 0.01
        assert errors["joint_itq"] < errors["random"] < errors["none"]


def refitted(path, weight):
    """The path with the latent scale of the least squared error: `((A^T A) o (B B^T))^-1 diag(A^T W B^T)`."""
    rows, columns = path.u1[:, None] * hard_sign(path.U), hard_sign(path.V) * path.v2
    latent = torch.linalg.solve((rows.T @ rows) * (columns @ columns.T), (rows.T @ weight @ columns.T).diagonal())
    return BinaryPath(path.U, path.V, path.u1, latent, torch.ones_like(latent), path.v2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rotation", ["none", "random", "joint_itq"])
def test_oracle_10_a_refitted_residual_never_hurts(rotation, seed):
    weight = heavy_tailed(seed)
    main, residual = factorize(weight, 16, rotation=rotation, generator=seeded(seed))
    rest = weight - main.to_dense()
    assert relative_error(weight, [main, refitted(residual, rest)]) <= relative_error(weight, [main])


@pytest.mark.parametrize("seed", range(3))
def test_oracle_11_a_refit_of_the_latent_scale_never_hurts(seed):
    weight = heavy_tailed(seed)
    (path,) = factorize(weight, 16, paths=1, generator=seeded(seed))
    assert relative_error(weight, [refitted(path, weight)]) <= relative_error(weight, [path])


def test_dual_svid_gives_the_best_rank_one_scales():
    left, right = randn(OUT, RANK), randn(RANK, IN, seed=1)
    path = dual_svid(left, right)
    for scales, factor in (((path.u1, path.u2), left), ((path.v1, path.v2), right)):
        vectors, values, others = torch.linalg.svd(factor.abs())
        assert_matches(torch.outer(*scales), values[0] * torch.outer(vectors[:, 0], others[0]), "fp64")
        assert_matches(scales[0].norm(), scales[1].norm(), "fp64")
        assert (scales[0] >= 0).all() and (scales[1] >= 0).all()


def test_the_residual_path_starts_from_what_is_left():
    weight = heavy_tailed()
    generator = seeded()
    main, residual = factorize(weight, 16, generator=generator)
    generator = seeded()
    (first,) = factorize(weight, 16, paths=1, generator=generator)
    (second,) = factorize(weight - first.to_dense(), 16, paths=1, generator=generator)
    for path, expected in ((main, first), (residual, second)):
        assert_matches(path.to_dense(), expected.to_dense(), "exact")


def test_the_global_generator_is_left_alone_and_the_seed_decides():
    weight = heavy_tailed(rows=OUT, columns=IN)
    state = torch.random.get_rng_state()
    first, again, other = (factorize(weight, RANK, generator=seeded(seed)) for seed in (0, 0, 1))
    assert_matches(torch.random.get_rng_state(), state, "exact")
    assert_matches(to_dense(first), to_dense(again), "exact")
    assert not torch.equal(to_dense(first), to_dense(other))


def test_large_weights_take_a_random_svd_that_is_as_good(monkeypatch):
    weight = heavy_tailed(rows=OUT * 4, columns=IN * 4)
    exact = factorize(weight, RANK, paths=1, rotation="none", generator=seeded())[0]
    monkeypatch.setattr(functional, "EXACT_SVD_LIMIT", 16)
    found = factorize(weight, RANK, paths=1, rotation="none", generator=seeded())[0]
    best = (weight - exact.U @ exact.V).norm()
    assert best <= (weight - found.U @ found.V).norm() < 1.001 * best
    again = factorize(weight, RANK, paths=1, rotation="none", generator=seeded())[0]
    assert_matches(found.U, again.U, "exact")


@pytest.mark.parametrize("rotation", ["none", "random", "joint_itq"])
@pytest.mark.parametrize("weight", [torch.zeros(6, 5), torch.ones(3, 2), torch.eye(4)])
def test_small_and_empty_weights(weight, rotation):
    """A rank beyond both sides, and nothing to fit: finite, and zeros stay zeros."""
    paths = factorize(weight.double(), 8, rotation=rotation, generator=seeded())
    assert [path.U.shape for path in paths] == [(weight.shape[0], 8)] * 2
    assert torch.isfinite(to_dense(paths)).all()
    if not weight.any():
        assert not to_dense(paths).any()


def test_row_efficiency():
    vectors = torch.tensor([[1.0, -1, 1, 1], [0, 5, 0, 0], [0, 0, 0, 0], [3, 4, 0, 0]], dtype=torch.float64)
    assert_matches(row_efficiency(vectors), torch.tensor([1.0, 0.25, 1.0, 49 / 100], dtype=torch.float64), "fp64")


def random_path(requires_grad=False):
    shapes = [(OUT, RANK), (RANK, IN), (OUT,), (RANK,), (RANK,), (IN,)]
    return BinaryPath(
        *(randn(*shape, seed=i).mul(0.02).requires_grad_(requires_grad) for i, shape in enumerate(shapes))
    )


def test_the_layer_is_its_dense_weight():
    path, hidden_states = random_path(), randn(2, 5, IN, seed=9)
    assert_vanishes((binary_linear(hidden_states, path) - hidden_states @ path.to_dense().T) * 1e4)


@pytest.mark.parametrize("sign", ["smoothsign", "ste"])
def test_gradients_are_the_closed_forms(sign):
    path, hidden_states = random_path(True), randn(7, IN, seed=9).requires_grad_()
    apply = (lambda x: SmoothSign.apply(x, 100.0)) if sign == "smoothsign" else StraightThroughSign.apply
    grad = randn(7, OUT, seed=10)
    binary_linear(hidden_states, path, apply).backward(grad)
    with torch.no_grad():
        us, vs, latent = hard_sign(path.U), hard_sign(path.V), path.u2 * path.v1
        slope = (lambda x: 100 / torch.cosh(100 * x).square()) if sign == "smoothsign" else torch.ones_like
        inner = (hidden_states * path.v2) @ vs.T
        back = (grad * path.u1) @ us
        latent_grad = (back * inner).sum(0)
        expected = {
            "U": slope(path.U) * ((grad * path.u1).T @ (inner * latent)),
            "V": slope(path.V) * ((back * latent).T @ (hidden_states * path.v2)),
            "u1": (grad * ((inner * latent) @ us.T)).sum(0),
            "u2": latent_grad * path.v1,
            "v1": latent_grad * path.u2,
            "v2": (hidden_states * ((back * latent) @ vs)).sum(0),
        }
        for name, value in expected.items():
            assert_matches(getattr(path, name).grad, value, "fp32")
        assert_matches(hidden_states.grad, path.v2 * ((back * latent) @ vs), "fp32")


def distillation_inputs(batch=4, length=6):
    logits = [randn(batch, length, 11, seed=seed) for seed in (0, 1)]
    states = [[randn(batch, length, 5, seed=10 * seed + layer) for layer in range(3)] for seed in (1, 2)]
    return *logits, *states


def test_distillation_is_the_official_loss():
    logits, teacher_logits, states, teacher_states = distillation_inputs()
    expected = F.kl_div(logits.log_softmax(-1), teacher_logits.softmax(-1), reduction="batchmean")
    expected += 10 * sum(F.mse_loss(a, b) for a, b in zip(states, teacher_states, strict=True))
    assert_matches(distillation_loss(logits, teacher_logits, states, teacher_states), expected, "fp64")
    plain = F.kl_div(logits.log_softmax(-1), teacher_logits.softmax(-1), reduction="batchmean")
    without = distillation_loss(logits, teacher_logits, states, teacher_states, hidden_loss_weight=0)
    assert_matches(without, plain, "fp64")


def test_a_teacher_that_agrees_costs_nothing():
    logits, _, states, _ = distillation_inputs()
    assert_vanishes(distillation_loss(logits, logits, states, states))


def test_padding_does_not_count():
    logits, teacher_logits, states, teacher_states = distillation_inputs(batch=1)
    expected = distillation_loss(logits, teacher_logits, states, teacher_states)
    padded = [F.pad(tensor, (0, 0, 2, 1), value=9.0) for tensor in (logits, teacher_logits)]
    padded[0][:, :2] = -7.0
    hidden = [[F.pad(tensor, (0, 0, 2, 1), value=fill) for tensor in side] for side, fill in
              ((states, 1.0), (teacher_states, 5.0))]  # fmt: skip
    mask = F.pad(torch.ones(1, 6), (2, 1))
    assert_matches(distillation_loss(*padded, *hidden, mask), expected, "fp64")


def test_the_loss_of_a_batch_is_the_mean_over_its_rows():
    """So that accumulating gradients over parts of a batch changes nothing, padding or not."""
    inputs = distillation_inputs()
    mask = torch.ones(4, 6)
    mask[1, :4] = mask[3, 5] = 0
    alone = [
        distillation_loss(
            *(tensor[i : i + 1] for tensor in inputs[:2]),
            *([tensor[i : i + 1] for tensor in side] for side in inputs[2:]),
            mask[i : i + 1],
        )
        for i in range(4)
    ]
    assert_matches(distillation_loss(*inputs, mask), torch.stack(alone).mean(), "fp64")


def test_the_gradient_of_the_loss_reaches_the_student_alone():
    logits, teacher_logits, states, teacher_states = copy.deepcopy(distillation_inputs())
    logits.requires_grad_()
    states[1].requires_grad_()
    distillation_loss(logits, teacher_logits, states, teacher_states).backward()
    assert_matches(logits.grad, (logits.detach().softmax(-1) - teacher_logits.softmax(-1)) / 4, "fp32")
    assert_matches(states[1].grad, 20 * (states[1].detach() - teacher_states[1]) / states[1].numel(), "fp64")
