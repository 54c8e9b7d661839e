import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from hf_ext.core.fingerprint import model_fingerprint, tensor_digest
from hf_ext.core.modules import (
    SlicedExperts,
    decoder_blocks,
    fused_experts,
    named_linears,
    replace_module,
    set_linear_weight,
    weight_of,
    why_not_sliceable,
)
from tests import tiny
from tests.numerics import assert_matches


BLOCKS = {
    "llama": "model.layers",
    "qwen3": "model.layers",
    "mistral": "model.layers",
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "gpt_neox": "gpt_neox.layers",
    "mixtral": "model.layers",
    "qwen3_moe": "model.layers",
}


@pytest.mark.parametrize("family", tiny.MODELS)
def test_decoder_blocks(tiny_model, family):
    name, blocks = decoder_blocks(tiny_model(family))
    assert (name, len(blocks)) == (BLOCKS[family], 2)


def test_encoder_decoder_is_refused():
    config = AutoConfig.for_model("t5", vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="encoder-decoder"):
        decoder_blocks(AutoModelForSeq2SeqLM.from_config(config))


def test_conv1d_weight_is_read_and_written_as_out_in(tiny_model):
    """A GPT-2 `Conv1D` must compute what an `nn.Linear` with the same `[out, in]` weight computes."""
    linears = dict(named_linears(tiny_model("gpt2")))
    conv = linears["transformer.h.0.mlp.c_fc"]
    x = torch.randn(3, tiny.HIDDEN_SIZE)
    expected = nn.functional.linear(x, weight_of(conv), conv.bias)
    assert_matches(conv(x), expected, "fp32")
    replacement = torch.randn(tiny.INTERMEDIATE_SIZE, tiny.HIDDEN_SIZE)
    set_linear_weight(conv, replacement)
    assert_matches(conv(x), nn.functional.linear(x, replacement, conv.bias), "fp32")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_sliced_experts_compute_the_same_and_fuse_back(tiny_model, family):
    model = tiny_model(family)
    original = copy.deepcopy(model)
    tokens = torch.randint(3, tiny.VOCAB_SIZE, (2, 16))
    expected = model(tokens).logits
    found = fused_experts(model)
    assert found
    for name, experts in found.items():
        assert why_not_sliceable(experts) is None
        replace_module(model, name, SlicedExperts(experts))
    assert not fused_experts(model)
    assert_matches(model(tokens).logits, expected, "fp32")
    for name in found:
        replace_module(model, name, model.get_submodule(name).fuse())
    assert model.state_dict().keys() == original.state_dict().keys()
    for name, tensor in original.state_dict().items():
        assert_matches(model.state_dict()[name], tensor, "exact")


def test_fingerprint_tells_fine_tunes_apart(tiny_llama):
    changed = copy.deepcopy(tiny_llama)
    assert model_fingerprint(tiny_llama) == model_fingerprint(changed)
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight.mul_(1.01)
    assert model_fingerprint(tiny_llama) != model_fingerprint(changed)


def test_digest_tells_order_shape_and_dtype_apart():
    first, second = torch.arange(4), torch.arange(4, 8)
    digests = [
        tensor_digest(tensors)
        for tensors in ([first, second], [second, first], [first.view(2, 2), second], [first.int(), second])
    ]
    assert len(set(digests)) == 4
    assert tensor_digest([torch.ones(3, dtype=torch.bfloat16)]) != tensor_digest(
        [torch.zeros(3, dtype=torch.bfloat16)]
    )
