"""The layer around `hf_ext.ops.low_bit_linear`, whose own tests judge the arithmetic."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_ext import LowBitLinear
from hf_ext.core.modules import weight_of
from hf_ext.ops.low_bit_linear import PackedWeight
from hf_ext.ops.packing import pack_codes
from hf_ext.quantizers.rounding import min_max_grid, round_to_grid
from tests.numerics import assert_matches


def layer_of(linear, bits=3, group_size=16):
    weight = weight_of(linear)
    scale, zero = min_max_grid(weight, bits, group_size)
    codes = round_to_grid(weight, scale, zero, bits, group_size)
    packed = PackedWeight(pack_codes(codes, bits), scale, zero, bits, weight.shape[1], group_size)
    return LowBitLinear.from_packed(linear, packed)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("out_features", [1, 3, 48, 65])
@pytest.mark.parametrize("in_features, group_size", [(64, -1), (64, 16), (60, 16), (41, -1), (41, 7)])
def test_forward_is_that_of_the_dequantized_linear(bits, out_features, in_features, group_size):
    """peers 4 and 6: any `out_features`, ragged last groups, rows that fill no whole byte."""
    layer = layer_of(nn.Linear(in_features, out_features), bits, group_size)
    x = torch.randn(2, 5, in_features)
    assert_matches(layer(x), nn.functional.linear(x, layer.dequantize(), layer.bias), "fp32")
    assert layer.weight_packed.numel() == out_features * -(-in_features // 8) * bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 40])
def test_every_activation_dtype(dtype, rows):
    layer = layer_of(nn.Linear(128, 64), bits=4, group_size=64).to(dtype)
    x = torch.randn(rows, 128).to(dtype)
    expected = nn.functional.linear(x.double(), layer.dequantize().double(), layer.bias.double())
    output = layer(x)
    assert output.dtype == dtype
    assert_matches(output.double(), expected, "lowp")


def test_the_source_class_comes_back():
    torch.manual_seed(0)
    conv, linear = Conv1D(24, 32), nn.Linear(32, 24, bias=False)
    x = torch.randn(4, 32)
    for source in (conv, linear):
        layer = layer_of(source)
        restored = layer.to_float(torch.float32)
        assert type(restored) is type(source)
        assert_matches(restored(x), layer(x), "fp32")
        assert (restored.bias is None) == (getattr(source, "bias", None) is None)


def test_a_cast_leaves_the_scales_alone():
    layer = layer_of(nn.Linear(64, 8))
    scale = layer.weight_scale.clone()
    for cast in (copy.deepcopy(layer).to(torch.bfloat16), copy.deepcopy(layer).half(), copy.deepcopy(layer).double()):
        assert_matches(cast.weight_scale, scale, "exact")
        assert cast.bias.dtype != torch.float32
        assert_matches(cast.to(torch.float32).weight_scale, scale, "exact")


def test_the_kernel_copy_follows_the_weight():
    """Loading another weight in place must not leave the copy of the old one behind."""
    first, second = (layer_of(nn.Linear(128, 64), bits=4, group_size=64).to(torch.bfloat16) for _ in range(2))
    x = torch.randn(1, 128, dtype=torch.bfloat16)
    assert not torch.equal(first(x), second(x))
    first.load_state_dict(second.state_dict())
    assert_matches(first(x), second(x), "exact")
    for again in (copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert_matches(again(x), second(x), "exact")


def test_no_copy_is_made_for_float32():
    layer = layer_of(nn.Linear(128, 64), bits=4, group_size=64)
    layer(torch.randn(1, 128))
    assert layer._cpu_weight is None


def test_only_the_packed_tensors_are_stored():
    layer = layer_of(nn.Linear(128, 64), bits=4, group_size=64).to(torch.bfloat16)
    layer(torch.randn(1, 128, dtype=torch.bfloat16))
    assert set(layer.state_dict()) == {"weight_packed", "weight_scale", "weight_zero", "bias"}
    assert not any(parameter.requires_grad for parameter in layer.parameters())
