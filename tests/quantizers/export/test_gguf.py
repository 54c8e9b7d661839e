"""GGUF files hold the model: read back tensor by tensor, and loaded whole by Transformers."""

import copy
from enum import IntEnum

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as gguf_dequantize
from transformers import AutoModelForCausalLM

from hf_ext.ops.packed_weight import dequantize
from hf_ext.quantizers.export import export_gguf
from hf_ext.quantizers.export.blocks import FORMATS
from hf_ext.quantizers.export.gguf import block_scales, scales_in_blocks
from hf_ext.quantizers.low_bit_linear import LowBitLinear
from tests import tiny
from tests.numerics import assert_matches
from tests.quantizers.export.packed_models import SIZES, dequantized, pack, packed_weight
from tests.quantizers.export.test_blocks import decode_q2_0


INPUT_IDS = torch.tensor([[3, 17, 40, 5, 61, 22, 9, 30]])
# Group sizes that a format holds exactly; -1 is the row.
EXACT = [("tq2_0", 256), ("tq1_0", -1), ("q2_0", 128), ("pq2_0", 256), ("q2_0_g64", 64), ("q2_0_g64", 128)]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture
def model():
    return pack(tiny.llama(**SIZES))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.fixture
def read(monkeypatch):
    """A function from a file and a format to its tensors by name; the package's reader is told of type 42."""

    def read(path, format):
        block_format = FORMATS[format]
        known = {member.name: member.value for member in gguf.GGMLQuantizationType}
        types = IntEnum("GGMLQuantizationType", {**known, block_format.name: block_format.type_id})
        with monkeypatch.context() as patch:
            patch.setattr(gguf.gguf_reader, "GGMLQuantizationType", types)
            sizes = (block_format.block_size, block_format.block_bytes)
            patch.setitem(gguf.constants.GGML_QUANT_SIZES, types[block_format.name], sizes)
            return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    return read


def values_of(tensor, format) -> torch.Tensor:
    if tensor.tensor_type != FORMATS[format].type_id or format.startswith("tq"):
        return torch.from_numpy(gguf_dequantize(tensor.data, tensor.tensor_type).copy())
    return torch.tensor([decode_q2_0(row.tobytes(), FORMATS[format].block_size) for row in tensor.data])


def metadata(path) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(INPUT_IDS).logits


def rotate_half_to_neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row `i` of the second half of a head goes right behind row `i` of the first, written out."""
    rows, size = [], weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            rows += [weight[head * size + i], weight[head * size + size // 2 + i]]
    return torch.stack(rows)


@pytest.mark.parametrize("format, group_size", EXACT)
def test_every_tensor_is_read_back_exactly(path, read, format, group_size):
    model = pack(tiny.llama(**SIZES, num_hidden_layers=1, attention_bias=True, mlp_bias=True), group_size=group_size)
    before = dict(gguf.GGML_QUANT_SIZES)
    report = export_gguf(model, path, format)
    assert before == gguf.GGML_QUANT_SIZES
    assert set(report.relative_error.values()) == {0.0} and report.lossy == ()
    assert report.file_bytes == path.stat().st_size

    tensors = read(path, format)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    expected = dict(dequantized(model).named_parameters())
    assert {names.get_name(name, (".weight", ".bias")) for name in expected} == set(tensors)
    for name, weight in expected.items():
        tensor = tensors[names.get_name(name, (".weight", ".bias"))]
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads:
            weight = rotate_half_to_neighbours(weight, heads)
        assert_matches(values_of(tensor, format), weight.detach(), "exact")
        layer = model.get_submodule(name.rpartition(".")[0])
        packed = isinstance(layer, LowBitLinear) and name.endswith(".weight")
        kind = FORMATS[format].type_id if packed else int(weight.dim() > 1)  # 0 is F32, 1 is F16
        assert (tensor.tensor_type, list(tensor.shape)) == (kind, list(weight.shape)[::-1])


@pytest.mark.parametrize("format", ["tq2_0", "tq1_0"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("mistral", {"sliding_window": None}), ("qwen3", {})],
    ids=["llama", "llama-tied", "mistral", "qwen3"],
)
def test_oracle_6_transformers_loads_the_file_with_the_same_logits(path, family, settings, format):
    # What Transformers reads for Qwen3 does not include the size of a head; 128 is its default.
    sizes = SIZES | ({"head_dim": 128} if family == "qwen3" else {})
    model = pack(tiny.MODELS[family](**sizes, **settings))
    export_gguf(model, path, format)
    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert loaded.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert_matches(logits(loaded), logits(dequantized(model)), "exact")
    assert_matches(logits(loaded), logits(model), "model")


def test_scales_are_rounded_to_fp16_and_nothing_else(model, path, read):
    layer = model.model.layers[0].mlp.down_proj
    layer.weight_scale = layer.weight_scale * 1.0003
    report = export_gguf(model, path, "tq2_0")
    stored = values_of(read(path, "tq2_0")["blk.0.ffn_down.weight"], "tq2_0")
    exact = layer.dequantize()
    assert 0 < report.largest_error == report.relative_error["model.layers.0.mlp.down_proj"] <= 2**-11
    assert ((stored - exact).abs() <= exact.abs() * 2**-11).all()
    assert_matches(stored.sign(), exact.sign(), "exact")
    assert_matches(stored.abs().amax(1), layer.weight_scale.half().float().amax(1), "exact")


def test_float_linears_stay_float(path, read):
    model = pack(tiny.llama(**SIZES), only=lambda name: "down_proj" not in name)
    export_gguf(model, path, "tq2_0")
    tensors = read(path, "tq2_0")
    assert tensors["blk.1.ffn_down.weight"].tensor_type == gguf.GGMLQuantizationType.F16
    assert tensors["blk.1.ffn_up.weight"].tensor_type == gguf.GGMLQuantizationType.TQ2_0
    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert_matches(logits(loaded), logits(dequantized(model)), "exact")


def test_metadata(model, path):
    export_gguf(model, path, "tq1_0")
    expected = {
        "general.architecture": "llama",
        "general.file_type": gguf.LlamaFileType.MOSTLY_TQ1_0,
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        "llama.vocab_size": 64,
        "llama.context_length": 128,
        "llama.embedding_length": 256,
        "llama.feed_forward_length": 512,
        "llama.block_count": 2,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 64,
        "llama.attention.value_length": 64,
        "llama.rope.dimension_count": 64,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-6),
        "tokenizer.ggml.model": "none",
    }
    found = metadata(path)
    assert {name: found[name] for name in expected} == expected


def test_context_ends_where_a_window_would_matter(path):
    export_gguf(pack(tiny.mistral(**SIZES)), path)
    assert metadata(path)["llama.context_length"] == 8


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}])
def test_rope_factors_turn_the_plain_frequencies_into_the_models(path, read, rope):
    model = pack(tiny.llama(**SIZES, rope_parameters=rope))
    export_gguf(model, path)
    factors = values_of(read(path, "tq2_0")["rope_freqs.weight"], "tq2_0")
    plain = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    assert_matches(plain / factors, model.model.rotary_emb.inv_freq, "fp32")
    assert factors.max() > 1


def test_lossy_scale_is_the_least_squares_one(path, read):
    model = pack(tiny.llama(**SIZES), group_size=128)
    with pytest.warns(UserWarning, match="14 weights"):
        report = export_gguf(model, path, "tq2_0", allow_lossy=True)
    assert len(report.lossy) == 14
    assert "14 weights share scales" in str(report)
    layer = model.model.layers[1].mlp.gate_proj
    exact, stored = layer.dequantize(), values_of(read(path, "tq2_0")["blk.1.ffn_gate.weight"], "tq2_0")
    error = float((stored - exact).norm() / exact.norm())
    assert_matches(torch.tensor(report.relative_error["model.layers.1.mlp.gate_proj"]), torch.tensor(error), "fp32")
    assert 0.1 < error < 0.5
    signs, scales = exact.sign(), block_scales(*scales_in_blocks(layer.packed, 256))
    for row in range(0, 512, 97):
        solution = torch.linalg.lstsq(signs[row, :, None], exact[row, :, None]).solution
        assert_matches(scales[row], solution[0], "fp32")
    assert_matches(stored.sign(), signs, "exact")


def test_lossy_is_exact_where_it_can_be(model, path):
    report = export_gguf(model, path, "tq2_0", allow_lossy=True)
    assert (report.largest_error, report.lossy) == (0.0, ())


@pytest.mark.parametrize(
    ("settings", "sizes", "format", "words"),
    [
        ({"group_size": 128}, {}, "tq2_0", ["group_size=256", "exactly: q2_0, pq2_0, q2_0_g64", "allow_lossy=True"]),
        ({"group_size": 64}, {}, "q2_0", ["64 columns, no multiple of 128", "exactly: q2_0_g64"]),
        ({"group_size": 64}, {"intermediate_size": 320}, "tq1_0", ["320 columns, no multiple of 256", "down_proj"]),
        ({"bits": 4, "codes": (0, 16), "zero": 8}, {}, "tq2_0", ["not ternary (4 bits)", "export_gptq"]),
        ({"codes": (0, 4)}, {}, "q2_0", ["not ternary (2 bits)"]),
        ({"zero": 2}, {}, "q2_0", ["not ternary (2 bits)"]),
    ],
    ids=["group", "group-q2_0", "columns", "bits", "code-3", "zero-2"],
)
def test_what_cannot_be_exact_is_refused_before_anything_is_written(path, settings, sizes, format, words):
    model = pack(tiny.llama(**{**SIZES, **sizes}), **settings)
    with pytest.raises(ValueError) as refusal:
        export_gguf(model, path, format)
    for word in ["model.layers.0.", "and 6 more" if not sizes else "model.layers.1.", *words]:
        assert word in str(refusal.value)
    assert list(path.parent.iterdir()) == []


def test_a_single_offender_is_named_alone(model, path):
    layer = model.model.layers[1].self_attn.o_proj
    model.model.layers[1].self_attn.o_proj = LowBitLinear.from_packed(
        layer.to_float(), packed_weight((256, 256), bits=3, codes=(0, 8), zero=4)
    )
    with pytest.raises(
        ValueError, match="these weights:\n  model.layers.1.self_attn.o_proj is not ternary .3 bits.\n"
    ):
        export_gguf(model, path)


def break_scales(model):
    model.model.layers[0].mlp.up_proj.weight_scale[3, 0] = 1e5


def break_embeddings(model):
    model.model.embed_tokens.weight.data[0, 0] = float("nan")


def break_offload(model):
    model.lm_head.to("meta")


def break_names(model):
    model.model.layers[0].mlp.extra = torch.nn.Linear(4, 4)


def break_buffers(model):
    model.model.register_buffer("counts", torch.zeros(2))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (break_scales, "model.layers.0.mlp.up_proj has scales over 65504"),
        (break_embeddings, "model.embed_tokens.weight is not finite"),
        (break_offload, "lm_head.weight is offloaded"),
        (break_names, "'model.layers.0.mlp.extra.weight' has no place"),
        (break_buffers, "model.counts is neither"),
    ],
)
def test_broken_models_are_refused(model, path, break_it, message):
    break_it(model)
    with pytest.raises(ValueError, match=message):
        export_gguf(model, path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tiny.gpt2(), "model_type 'gpt2' .* Available: llama, mistral, qwen3"),
        (lambda: tiny.qwen3(attention_bias=True), "no attention biases for 'qwen3'"),
        (lambda: tiny.llama(hidden_act="gelu"), "hidden_act='gelu'"),
        (lambda: tiny.qwen3(rope_parameters={**LLAMA3_ROPE}), "for 'qwen3' the rotations default of"),
        (lambda: tiny.llama(), "no LowBitLinear"),
    ],
)
def test_other_models_are_refused(path, build, message):
    with pytest.raises(ValueError, match=message):
        export_gguf(build(), path)


def test_wrong_arguments(model, path):
    with pytest.raises(ValueError, match="Did you mean 'tq2_0'?"):
        export_gguf(model, path, "tq20")
    with pytest.raises(ValueError, match="is a folder; give a file"):
        export_gguf(model, path.parent)
    with pytest.raises(ValueError, match="there is no folder"):
        export_gguf(model, path.parent / "absent" / "model.gguf")


def test_interrupted_export_leaves_the_old_file(model, path, monkeypatch):
    export_gguf(model, path)
    before = path.read_bytes()

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_ext.quantizers.export.gguf.encode_rows", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_gguf(model, path, "tq1_0")
    assert [file.name for file in path.parent.iterdir()] == ["model.gguf"]
    assert path.read_bytes() == before


def test_model_is_left_alone(model, path):
    before = copy.deepcopy(model.state_dict())
    export_gguf(model.to(torch.bfloat16), path)
    for name, tensor in model.float().state_dict().items():
        assert_matches(
            tensor,
            before[name].bfloat16().float()
            if tensor.is_floating_point() and "weight_scale" not in name
            else before[name],
            "exact",
        )


def test_subnormal_scales_keep_the_absolute_bound():
    weight = packed_weight((4, 256))
    weight.scale.mul_(1e-5)
    stored = block_scales(*scales_in_blocks(weight, 256)).half().float()
    assert ((stored - weight.scale).abs() <= 2**-25).all()
    assert dequantize(weight).abs().max() > 0
