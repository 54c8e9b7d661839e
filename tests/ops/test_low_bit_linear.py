import pytest
import torch
import torch.nn.functional as F

from hf_ext.ops import cpu_kernels
from hf_ext.ops.cpu_kernels import prepare_cpu
from hf_ext.ops.low_bit_linear import INT4_MAX_ROWS, choose_backend, force_backend, low_bit_linear
from hf_ext.ops.packed_weight import PackedWeight, dequantize
from hf_ext.ops.packing import pack_codes
from tests.numerics import assert_matches


needs_cpu_kernels = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="the CPU kernels need AVX2 or AVX512"
)

# (out_features, in_features, bits, group_size): odd sizes, ragged last groups, and groups that no block unpacks
SHAPES = [
    (1, 64, 4, 32),
    (3, 100, 2, 8),
    (48, 192, 3, -1),
    (65, 250, 4, 64),
    (65, 70, 3, 24),
    (16, 50, 4, 20),
    (5, 33, 8, 16),
    (48, 96, 8, -1),
]

KERNEL_SHAPES = [
    (1, 64, 4, 32, "int4"),
    (3, 576, 3, 128, "int4"),
    (48, 192, 3, -1, "int4"),
    (65, 512, 4, 256, "int4"),
    (65, 128, 2, 64, "int4"),
    (65, 96, 8, -1, "int8"),
]


def random_weight(out_features, in_features, bits, group_size, zero=None):
    generator = torch.Generator().manual_seed(out_features + in_features + bits)
    groups = 1 if group_size == -1 else -(-in_features // group_size)
    codes = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8, generator=generator)
    scale = torch.rand(out_features, groups, generator=generator) + 0.1
    zeros = torch.randint(0, 2**bits, (out_features, groups), dtype=torch.uint8, generator=generator)
    if zero is not None:
        zeros.fill_(zero)
    return PackedWeight(pack_codes(codes, bits), scale, zeros, bits, in_features, group_size)


def random_rows(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def exact_linear(hidden_states, weight):
    return F.linear(hidden_states.double(), dequantize(weight).double())


def relative_error(actual, expected):
    return (actual.double() - expected).norm() / expected.norm()


def test_dequantize_is_code_minus_zero_times_scale():
    codes = torch.tensor([[0, 1, 2, 3, 3]], dtype=torch.uint8)
    weight = PackedWeight(
        pack_codes(codes, 2), torch.tensor([[0.5, 2.0]]), torch.tensor([[1, 3]], dtype=torch.uint8), 2, 5, 3
    )
    assert_matches(dequantize(weight), torch.tensor([[-0.5, 0.0, 0.5, 0.0, 0.0]]), "exact")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 70])
def test_linear_equals_the_dequantized_linear(shape, rows):
    weight, hidden_states, bias = random_weight(*shape), random_rows(rows, shape[1]), random_rows(shape[0])
    expected = exact_linear(hidden_states, weight) + bias.double()
    actual = low_bit_linear(hidden_states.double(), weight, bias, prepare_cpu(weight))
    assert_matches(actual, expected, "fp64")
    assert_matches(
        low_bit_linear(hidden_states, weight, bias), F.linear(hidden_states, dequantize(weight), bias), "lowp"
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_dequantizing_by_blocks_gives_the_reference_weight(shape, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "DEQUANTIZE_BLOCK", 1000)
    weight = random_weight(*shape)
    if not weight.groups_are_whole_units:
        with pytest.raises(ValueError, match="group_size=20"), force_backend("dequantize"):
            low_bit_linear(random_rows(1, shape[1]), weight)
        return
    with force_backend("dequantize"):
        columns = low_bit_linear(torch.eye(shape[1]), weight)
    assert_matches(columns.t(), dequantize(weight), "exact")


@pytest.mark.parametrize("shape", SHAPES[:5])
def test_bfloat16_blocks_do_without_onednn(shape, monkeypatch):
    weight, hidden_states = random_weight(*shape), torch.eye(shape[1], dtype=torch.bfloat16)
    with force_backend("dequantize"):
        fast = low_bit_linear(hidden_states, weight)
        monkeypatch.setattr(cpu_kernels, "_onednn_is_fast", lambda: False)
        plain = low_bit_linear(hidden_states, weight)
    assert_matches(plain.t(), dequantize(weight, torch.bfloat16), "exact")
    assert_matches(fast, plain, "lowp")


@needs_cpu_kernels
@pytest.mark.parametrize("shape", KERNEL_SHAPES)
@pytest.mark.parametrize("backend", ["kernel", "dequantize", "reference"])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_bfloat16_backends_are_as_accurate_as_eager(shape, backend, rows):
    *shape, kernel = shape
    weight, hidden_states = random_weight(*shape), random_rows(rows, shape[1], dtype=torch.bfloat16)
    exact = exact_linear(hidden_states, weight)
    eager_error = relative_error(F.linear(hidden_states, dequantize(weight, torch.bfloat16)), exact)
    with force_backend(kernel if backend == "kernel" else backend):
        actual = low_bit_linear(hidden_states, weight, None, prepare_cpu(weight))
    assert actual.dtype == torch.bfloat16
    assert_matches(actual, exact, "lowp")
    # one output of one row has an error of chance size: compare with bf16's own rounding unit where eager was lucky
    assert relative_error(actual, exact) <= 2 * max(eager_error, torch.finfo(torch.bfloat16).eps / 4)


@needs_cpu_kernels
@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, -1), (4, 64), (8, -1)])
@pytest.mark.parametrize("extreme", ["lowest zero", "highest zero", "tiny scale", "huge scale"])
def test_kernels_hold_at_extremes(bits, group_size, extreme):
    zero = {"lowest zero": 0, "highest zero": 2**bits - 1}.get(extreme)
    weight = random_weight(64, 256, bits, group_size, zero)
    weight.scale.mul_({"tiny scale": 1e-20, "huge scale": 1e20}.get(extreme, 1.0))
    runtime, hidden_states = prepare_cpu(weight), random_rows(4, 256, dtype=torch.bfloat16)
    assert_matches(low_bit_linear(hidden_states, weight, None, runtime), exact_linear(hidden_states, weight), "lowp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_leading_shapes_strides_and_empty_batches(dtype):
    weight = random_weight(65, 64, 4, 32)
    runtime, bias = prepare_cpu(weight), random_rows(65, dtype=dtype)
    for shape in [(64,), (1, 64), (2, 3, 64), (0, 64), (2, 0, 64)]:
        hidden_states = random_rows(*shape, dtype=dtype)
        actual = low_bit_linear(hidden_states, weight, bias, runtime)
        assert actual.dtype == dtype
        assert_matches(actual, exact_linear(hidden_states, weight) + bias.double(), "lowp")
    strided = random_rows(64, 6, dtype=dtype).t()
    before = strided.clone()
    assert_matches(low_bit_linear(strided, weight, None, runtime), exact_linear(strided, weight), "lowp")
    assert_matches(strided, before, "exact")


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_equal_those_of_the_dequantized_linear(shape):
    weight = random_weight(*shape)
    hidden_states = random_rows(2, 3, shape[1]).double().requires_grad_()
    bias = random_rows(shape[0]).double().requires_grad_()
    grad_output = random_rows(2, 3, shape[0]).double()
    low_bit_linear(hidden_states, weight, bias).backward(grad_output)
    expected = torch.autograd.grad(
        F.linear(hidden_states, dequantize(weight).double(), bias), (hidden_states, bias), grad_output
    )
    assert_matches(hidden_states.grad, expected[0], "fp32")
    assert_matches(bias.grad, expected[1], "fp32")


def test_no_dequantized_weight_is_saved_for_backward():
    weight, saved = random_weight(64, 256, 4, 32), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        low_bit_linear(random_rows(2, 256).requires_grad_(), weight).sum().backward()
    assert all(tensor.numel() < 64 * 256 for tensor in saved)


def test_autocast_runs_in_its_dtype_and_trains():
    weight = random_weight(48, 64, 4, 32)
    hidden_states, bias = random_rows(3, 64).requires_grad_(), random_rows(48).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        actual = low_bit_linear(hidden_states, weight, bias, prepare_cpu(weight))
        assert actual.dtype == torch.bfloat16
    assert_matches(actual, exact_linear(hidden_states, weight) + bias.double(), "lowp")
    actual.float().sum().backward()
    assert hidden_states.grad.dtype == bias.grad.dtype == torch.float32
    assert_matches(hidden_states.grad, dequantize(weight).double().sum(0).expand(3, -1), "lowp")


@pytest.mark.parametrize("rows", [2, 64])
def test_compiles(rows):
    weight = random_weight(48, 64, 4, 32)
    runtime, hidden_states = prepare_cpu(weight), random_rows(rows, 64, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: low_bit_linear(x, weight, None, runtime) * 2, backend="aot_eager")
    assert_matches(compiled(hidden_states), exact_linear(hidden_states, weight) * 2, "lowp")


@needs_cpu_kernels
def test_choice_follows_the_call_and_says_why():
    weight = random_weight(16, 64, 4, 32)
    runtime = prepare_cpu(weight)
    assert choose_backend(weight, 1, torch.bfloat16, "cpu", runtime).name == "int4"
    many = choose_backend(weight, INT4_MAX_ROWS + 1, torch.bfloat16, "cpu", runtime)
    assert (many.name, "rows" in many.reason) == ("dequantize", True)
    assert "bfloat16" in choose_backend(weight, 1, torch.float32, "cpu", runtime).reason
    assert "prepare_cpu" in choose_backend(weight, 1, torch.bfloat16, "cpu").reason
    assert choose_backend(weight, 1, torch.bfloat16, "cuda").name == "reference"
    ragged = random_weight(16, 50, 4, 16)
    assert prepare_cpu(ragged) is None
    assert "multiples of 32" in choose_backend(ragged, 1, torch.bfloat16).reason
    with force_backend("reference"):
        assert choose_backend(weight, 1, torch.bfloat16, "cpu", runtime).reason == "forced"
    assert choose_backend(weight, 1, torch.bfloat16, "cpu", runtime).name == "int4"


def test_errors_name_the_value():
    weight = random_weight(16, 64, 4, 32)
    with pytest.raises(ValueError, match="backend is 'cuda'"), force_backend("cuda"):
        pass
    with pytest.raises(ValueError, match="torch.float32 on cpu"), force_backend("int4"):
        low_bit_linear(random_rows(1, 64), weight, None, prepare_cpu(weight))
    with pytest.raises(ValueError, match=r"\(1, 32\)"):
        low_bit_linear(random_rows(1, 32), weight)
    with pytest.raises(ValueError, match="scale has shape"):
        PackedWeight(weight.codes, weight.scale[:, :1], weight.zero, 4, 64, 32)
    with pytest.raises(ValueError, match="group_size is 0"):
        PackedWeight(weight.codes, weight.scale, weight.zero, 4, 64, 0)
