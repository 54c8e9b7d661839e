import pytest
import torch
import torch.nn.functional as F

from hf_ext.ops.factored_binary_linear import (
    FactoredWeight,
    choose_factored_backend,
    dequantize_factored,
    factored_binary_linear,
    pack_signs,
    prepare_factored_cpu,
    unpack_signs,
)
from hf_ext.ops.low_bit_linear import INT4_MAX_ROWS, force_backend
from tests.numerics import assert_matches


needs_cpu_kernels = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="the CPU kernels need AVX2 or AVX512"
)

# (out_features, in_features, rank, paths): odd sizes, ranks that fill no byte, and ranks above 32 that fill no word
SHAPES = [(1, 8, 8, 1), (5, 33, 3, 2), (48, 70, 40, 2), (65, 100, 8, 1), (16, 9, 65, 2)]
KERNEL_SHAPES = [(17, 32, 8, 1), (48, 64, 40, 2), (65, 576, 96, 2), (64, 256, 33, 1)]


def random_signs(*shape, seed=0):
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randint(0, 2, shape, generator=generator) * 2.0 - 1


def random_parts(out_features, in_features, rank, paths):
    """Signs and scales of every path, `(U, V, h, l, g)`, and the weight that packs them."""
    generator = torch.Generator().manual_seed(out_features + in_features + rank)
    parts = []
    for path in range(paths):
        scales = [
            (0.1 + torch.rand(size, generator=generator)).bfloat16() for size in (out_features, rank, in_features)
        ]
        signs = random_signs(out_features, rank, seed=path), random_signs(rank, in_features, seed=path)
        parts.append((*signs, *scales))
    u_signs, v_signs = (torch.stack([pack_signs(part[i]) for part in parts]) for i in range(2))
    scales = [torch.stack([part[i] for part in parts]) for i in range(2, 5)]
    return parts, FactoredWeight(u_signs, v_signs, *scales, in_features, rank)


def random_weight(*shape):
    return random_parts(*shape)[1]


def random_rows(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def exact_linear(hidden_states, weight):
    return F.linear(hidden_states.double(), dequantize_factored(weight, torch.float64))


@pytest.mark.parametrize("shape", SHAPES)
def test_oracle_06_the_layer_is_the_sum_of_its_dense_paths(shape):
    parts, weight = random_parts(*shape)
    dense = sum(
        h.double().diag() @ u.double() @ k.double().diag() @ v.double() @ g.double().diag() for u, v, h, k, g in parts
    )
    assert_matches(dequantize_factored(weight, torch.float64), dense, "fp64")
    hidden_states = random_rows(7, shape[1])
    assert_matches(factored_binary_linear(hidden_states.double(), weight), hidden_states.double() @ dense.T, "fp64")
    # fp32 sums in another order: elements may cancel
    assert_matches(factored_binary_linear(hidden_states, weight), hidden_states.double() @ dense.T, "model")


@pytest.mark.parametrize("columns", [1, 7, 8, 31, 32, 33, 40, 64, 80, 95])
def test_oracle_06_signs_round_trip_at_every_bit_position(columns):
    signs = torch.ones(columns, columns) - 2 * torch.eye(columns)
    assert_matches(unpack_signs(pack_signs(signs), columns), signs, "exact")
    signs = random_signs(5, columns)
    packed = pack_signs(signs)
    assert packed.shape == (-(-columns // 8), 5)
    assert_matches(unpack_signs(packed, columns).t().contiguous(), signs, "exact")


def test_oracle_07_the_bits_are_those_of_the_official_words():
    """32 signs of a row, read as a little-endian int32: bit 1 is -1, the lowest bit comes first."""
    signs = torch.ones(2, 32)
    signs[0, 0] = signs[0, 31] = signs[1, 1] = -1
    words = pack_signs(signs).t().contiguous().view(torch.int32)
    assert_matches(words, torch.tensor([[-2147483647], [2]], dtype=torch.int32), "exact")


def test_every_bit_is_counted():
    weight = random_weight(64, 128, 40, 2)
    bits = 2 * (40 * (64 + 128) + 16 * (64 + 40 + 128))
    assert_matches(torch.tensor(weight.bits_per_weight), torch.tensor(bits / (64 * 128)), "fp64")


@pytest.mark.parametrize("dtype, kind", [(torch.float64, "fp64"), (torch.float32, "model"), (torch.bfloat16, "lowp"),
                                         (torch.float16, "lowp")])  # fmt: skip
@pytest.mark.parametrize("backend", ["dequantize", "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_backends_match_the_dequantized_weight(shape, backend, dtype, kind):
    weight, bias = random_weight(*shape), random_rows(shape[0])
    hidden_states = random_rows(3, 5, shape[1], dtype=dtype)
    with force_backend(backend):
        actual = factored_binary_linear(hidden_states, weight, bias)
    assert actual.dtype == dtype
    assert_matches(actual, exact_linear(hidden_states, weight) + bias.to(dtype).double(), kind)


@needs_cpu_kernels
@pytest.mark.parametrize("rows", [1, 5, INT4_MAX_ROWS])
@pytest.mark.parametrize("shape", KERNEL_SHAPES)
def test_the_kernel_matches_the_dequantized_weight(shape, rows):
    weight, bias = random_weight(*shape), random_rows(shape[0])
    hidden_states = random_rows(rows, shape[1], dtype=torch.bfloat16)
    runtime = prepare_factored_cpu(weight)
    assert choose_factored_backend(rows, torch.bfloat16, "cpu", runtime).name == "int4"
    actual = factored_binary_linear(hidden_states, weight, bias, runtime)
    assert_matches(actual, exact_linear(hidden_states, weight) + bias.bfloat16().double(), "lowp")


def test_small_scales_survive_float16():
    parts, weight = random_parts(48, 70, 40, 2)
    tiny, large = (weight.latent_scale * 2**-30, weight.out_scale * 2**30)
    shifted = FactoredWeight(weight.u_signs, weight.v_signs, large, tiny, weight.in_scale, 70, 40)
    assert_matches(dequantize_factored(shifted, torch.float64), dequantize_factored(weight, torch.float64), "fp64")
    small = FactoredWeight(weight.u_signs, weight.v_signs, weight.out_scale * 2**8, weight.latent_scale * 2**-8,
                           weight.in_scale, 70, 40)  # fmt: skip
    hidden_states = random_rows(4, 70, dtype=torch.float16)
    assert_matches(factored_binary_linear(hidden_states, small), exact_linear(hidden_states, weight), "lowp")


@pytest.mark.parametrize("backend", ["dequantize", "reference"])
def test_gradients_match_autograd_through_the_dense_weight(backend):
    weight = random_weight(48, 70, 40, 2)
    hidden_states = random_rows(2, 5, 70, dtype=torch.float64).requires_grad_()
    bias = random_rows(48, dtype=torch.float64).requires_grad_()
    seed = random_rows(2, 5, 48, dtype=torch.float64)
    with force_backend(backend):
        factored_binary_linear(hidden_states, weight, bias).backward(seed)
    dense = dequantize_factored(weight, torch.float64)
    assert_matches(hidden_states.grad, seed @ dense, "fp64")
    assert_matches(bias.grad, seed.sum((0, 1)), "fp64")


def test_the_backward_pass_keeps_no_float_weight():
    weight = random_weight(48, 70, 40, 2)
    hidden_states = random_rows(5, 70).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        factored_binary_linear(hidden_states, weight).sum().backward()
    assert saved == []


@needs_cpu_kernels
def test_gradients_behind_the_kernel_and_autocast():
    weight, bias = random_weight(48, 64, 40, 2), random_rows(48).requires_grad_()
    hidden_states = random_rows(3, 64).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        actual = factored_binary_linear(hidden_states, weight, bias, prepare_factored_cpu(weight))
    assert actual.dtype == torch.bfloat16
    assert_matches(actual, exact_linear(hidden_states, weight) + bias.double(), "lowp")
    actual.float().sum().backward()
    assert hidden_states.grad.dtype == bias.grad.dtype == torch.float32
    assert_matches(hidden_states.grad, dequantize_factored(weight).double().sum(0).expand(3, -1), "lowp")


@pytest.mark.parametrize("rows", [0, 2, 64])
def test_inputs_need_not_be_contiguous_and_may_be_empty(rows):
    weight = random_weight(48, 64, 40, 2)
    runtime = prepare_factored_cpu(weight)
    for dtype, kind in ((torch.float32, "model"), (torch.bfloat16, "lowp")):
        hidden_states = random_rows(64, rows, 2, dtype=dtype).permute(2, 1, 0)
        actual = factored_binary_linear(hidden_states, weight, None, runtime)
        assert actual.shape == (2, rows, 48)
        assert_matches(actual, exact_linear(hidden_states, weight), kind)


@pytest.mark.parametrize("rows", [2, 64])
def test_compiles(rows):
    weight = random_weight(48, 64, 40, 2)
    runtime, hidden_states = prepare_factored_cpu(weight), random_rows(rows, 64, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: factored_binary_linear(x, weight, None, runtime) * 2, backend="aot_eager")
    assert_matches(compiled(hidden_states), exact_linear(hidden_states, weight) * 2, "lowp")


@needs_cpu_kernels
def test_choice_follows_the_call_and_says_why():
    runtime = prepare_factored_cpu(random_weight(48, 64, 40, 2))
    assert prepare_factored_cpu(random_weight(48, 70, 40, 2)) is None
    assert choose_factored_backend(1, torch.bfloat16, "cpu", runtime).name == "int4"
    many = choose_factored_backend(INT4_MAX_ROWS + 1, torch.bfloat16, "cpu", runtime)
    assert (many.name, "rows" in many.reason) == ("dequantize", True)
    for choice in (
        choose_factored_backend(1, torch.float32, "cpu", runtime),
        choose_factored_backend(1, torch.bfloat16, "cuda", runtime),
        choose_factored_backend(1, torch.bfloat16),
    ):
        assert (choice.name, "no kernel copy" in choice.reason) == ("dequantize", True)
    with force_backend("reference"):
        assert choose_factored_backend(1, torch.bfloat16, "cpu", runtime).reason == "forced"


def test_errors_name_the_value():
    weight = random_weight(48, 64, 40, 2)
    with pytest.raises(ValueError, match=r"\(1, 32\)"):
        factored_binary_linear(random_rows(1, 32), weight)
    with pytest.raises(ValueError, match="'int4' is forced, but .* torch.float32 on cpu"), force_backend("int4"):
        factored_binary_linear(random_rows(1, 64), weight)
    with pytest.raises(ValueError, match="'int8' is forced"), force_backend("int8"):
        factored_binary_linear(random_rows(1, 64), weight)
    with pytest.raises(ValueError, match=r"u_signs has shape .*2 paths of rank 41 from 64 to 48"):
        FactoredWeight(weight.u_signs, weight.v_signs, weight.out_scale, weight.latent_scale, weight.in_scale, 64, 41)
