"""GPTQ checkpoints hold the model: decoded from the layout, and by GPTQModel where it is installed."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, GPTQConfig

from hf_ext.ops.packed_weight import PackedWeight, dequantize
from hf_ext.ops.packing import unpack_codes
from hf_ext.quantizers.export import export_gptq
from hf_ext.quantizers.export.gptq import gptq_tensors, scale_error
from hf_ext.quantizers.low_bit_linear import LowBitLinear
from tests import tiny
from tests.numerics import assert_matches
from tests.quantizers.export.packed_models import SIZES, dequantized, pack, packed_weight


INPUT_IDS = torch.tensor([[3, 17, 40, 5, 61, 22, 9, 30]])
KINDS = [(2, 1, (0, 3)), *((bits, 2 ** (bits - 1), (0, 2**bits)) for bits in (2, 3, 4, 8))]
KINDS += [(bits, None, (0, 2**bits)) for bits in (2, 3, 4, 8)]


def stream(words: list[int], bits: int) -> list[int]:
    """The values that 32-bit words hold as one stream of bits, lowest first."""
    number = sum((word & 0xFFFFFFFF) << 32 * index for index, word in enumerate(words))
    return [number >> bits * index & (2**bits - 1) for index in range(len(words) * 32 // bits)]


def decode(tensors: dict[str, torch.Tensor], bits: int, add_one: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers `code - zero` and scales, both `[out, in]`, from the layout."""
    codes = torch.tensor([stream(column, bits) for column in tensors["qweight"].T.tolist()])
    zeros = torch.tensor([stream(row, bits) for row in tensors["qzeros"].tolist()]).T + int(add_one)
    group = tensors["g_idx"].long()
    return codes - zeros[:, group], tensors["scales"].T[:, group]


def integers(weight: PackedWeight) -> torch.Tensor:
    codes = unpack_codes(weight.codes, weight.bits, weight.in_features).long()
    return codes - weight.per_column(weight.zero.long())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "gptq"


@pytest.mark.parametrize("group_size", [32, 96, -1])
@pytest.mark.parametrize("bits, zero, codes", KINDS)
@pytest.mark.parametrize("subtract_one", [True, False])
def test_layout_is_decoded_exactly(bits, zero, codes, group_size, subtract_one):
    weight = packed_weight((64, 160), bits, group_size, zero, codes)
    if subtract_one:
        weight.zero.clamp_(min=1)  # 0 less 1 cannot be stored; such models are written with zeros as they are
    tensors = gptq_tensors(weight, subtract_one=subtract_one)
    found, scales = decode(tensors, bits, add_one=subtract_one)
    assert_matches(found, integers(weight), "exact")
    assert_matches(scales.float(), weight.per_column(weight.scale).expand(64, 160), "exact")
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert kinds == {
        "qweight": (torch.int32, (160 * bits // 32, 64)),
        "qzeros": (torch.int32, (weight.groups, 64 * bits // 32)),
        "scales": (torch.float16, (weight.groups, 64)),
        "g_idx": (torch.int32, (160,)),
    }


def test_ternary_zero_is_the_middle_one():
    """Some readers of symmetric checkpoints take `2^(bits - 1)` for every zero without a look at `qzeros`."""
    weight = packed_weight((32, 64), group_size=64)
    tensors = gptq_tensors(weight, subtract_one=True)
    assert set(tensors["qzeros"].flatten().tolist()) == {0x55555555}  # 1 = 2 - 1 in every field
    codes = torch.tensor([stream(column, 2) for column in tensors["qweight"].T.tolist()])
    assert_matches(codes - 2, integers(weight), "exact")


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("bits, zero, codes", [KINDS[0], KINDS[2], KINDS[-2]])
def test_folder_holds_the_whole_model(folder, family, bits, zero, codes):
    model = pack(tiny.MODELS[family](**SIZES), bits=bits, group_size=64, zero=zero, codes=codes)
    model.generation_config.repetition_penalty = 1.5
    report = export_gptq(model, folder, tokenizer=tiny.tokenizer())
    assert set(report.relative_error.values()) == {0.0}
    assert report.file_bytes == (folder / "model.safetensors").stat().st_size

    config = AutoConfig.from_pretrained(folder)
    settings = config.quantization_config
    expected = {"quant_method": "gptq", "bits": bits, "group_size": 64, "desc_act": False, "sym": zero is not None}
    assert settings.items() >= (expected | {"format": "gptq" if zero is not None else "gptq_v2"}).items()
    assert GPTQConfig.from_dict(dict(settings)).format == settings["checkpoint_format"]
    assert GenerationConfig.from_pretrained(folder).repetition_penalty == 1.5
    assert AutoTokenizer.from_pretrained(folder)("w1 w2")["input_ids"] == [9, 10]
    assert hasattr(model.config, "quantization_config") is False

    tensors = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in tensors) is not model.config.tie_word_embeddings
    floats = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] in ("weight", "bias")}
    for name, layer in model.named_modules():
        if isinstance(layer, LowBitLinear):
            packed = {kind: tensors.pop(f"{name}.{kind}") for kind in ("qweight", "qzeros", "scales", "g_idx")}
            found, scales = decode(packed, bits, add_one=settings["format"] == "gptq")
            floats[f"{name}.weight"] = found * scales.float()
    assert set(tensors) <= set(floats)
    reference = dequantized(model)
    if model.config.tie_word_embeddings:
        floats["lm_head.weight"] = floats["model.embed_tokens.weight"]
    rebuilt = tiny.MODELS[family](**SIZES, initializer_range=0.5)
    rebuilt.load_state_dict(floats, strict=True)
    with torch.no_grad():
        assert_matches(rebuilt(INPUT_IDS).logits, reference(INPUT_IDS).logits, "exact")


def test_biases_and_transposed_layers(folder):
    model = pack(tiny.gpt2(), group_size=32)
    export_gptq(model, folder)
    tensors = load_file(folder / "model.safetensors")
    layer = model.transformer.h[1].mlp.c_fc
    packed = {kind: tensors[f"transformer.h.1.mlp.c_fc.{kind}"] for kind in ("qweight", "qzeros", "scales", "g_idx")}
    found, scales = decode(packed, 2, add_one=True)
    assert_matches(found * scales.float(), layer.dequantize(), "exact")
    assert_matches(tensors["transformer.h.1.mlp.c_fc.bias"], layer.bias.data, "exact")


def test_scales_are_rounded_to_fp16_and_nothing_else(folder):
    model = pack(tiny.llama(**SIZES))
    layer = model.model.layers[0].mlp.down_proj
    layer.weight_scale = layer.weight_scale * 1.0003
    report = export_gptq(model, folder)
    rounded = layer.packed.per_column(layer.packed.scale.half().float() / layer.packed.scale) - 1
    error = (layer.dequantize() * rounded).norm() / layer.dequantize().norm()
    assert_matches(torch.tensor(report.largest_error), error, "fp32")
    assert 0 < report.largest_error == report.relative_error["model.layers.0.mlp.down_proj"] <= 2**-11
    stored = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.scales"]
    assert_matches(stored, layer.weight_scale.T.half(), "exact")


@pytest.mark.parametrize("group_size", [96, -1])
def test_error_is_that_of_the_weight(group_size):
    weight = packed_weight((8, 160), 4, group_size, None, (0, 16))
    weight.scale.mul_(1.0003)
    stored = integers(weight) * weight.per_column(weight.scale.half().float())
    error = (stored - dequantize(weight)).norm() / dequantize(weight).norm()
    assert_matches(torch.tensor(scale_error(weight)), error, "fp32")


def test_float_linears_are_named_by_the_config(folder):
    model = pack(tiny.llama(**SIZES), only=lambda name: "down_proj" not in name)
    export_gptq(model, folder)
    (names,) = AutoConfig.from_pretrained(folder).quantization_config["modules_in_block_to_quantize"]
    attention = [f"self_attn.{kind}_proj" for kind in "koqv"]
    assert names == ["mlp.gate_proj", "mlp.up_proj", *attention]
    assert "model.layers.0.mlp.down_proj.weight" in load_file(folder / "model.safetensors")


def test_blocks_that_differ_are_refused(folder):
    model = pack(tiny.llama(**SIZES), only=lambda name: name != "1.mlp.down_proj")
    with pytest.raises(ValueError, match=r"float that others have packed \(model.layers.1.mlp.down_proj\)"):
        export_gptq(model, folder)
    assert not folder.exists()


def swap(name, **settings):
    def change(model):
        layer = model.get_submodule(name)
        weight = packed_weight((layer.out_features, layer.in_features), **settings)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LowBitLinear.from_packed(layer.to_float(), weight))

    return change


def pack_head(model):
    model.lm_head = LowBitLinear.from_packed(model.lm_head, packed_weight((64, 256)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap("model.layers.1.mlp.up_proj", bits=4), "up_proj has 4 bits and group_size 256, others 2 and 256"),
        (swap("model.layers.1.mlp.up_proj", group_size=128), "up_proj has 2 bits and group_size 128, others 2 and"),
        (pack_head, "lm_head is outside the decoder blocks"),
    ],
)
def test_mixed_models_are_refused_before_anything_is_written(folder, change, message):
    model = pack(tiny.llama(**SIZES))
    change(model)
    with pytest.raises(ValueError, match=message):
        export_gptq(model, folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: pack(tiny.llama(intermediate_size=72), group_size=8), "down_proj has in_features 72: 2-bit codes"),
        (lambda: pack(tiny.mixtral(), group_size=32), "model.layers.0.mlp.experts holds experts"),
        (lambda: tiny.llama(), "no LowBitLinear"),
    ],
)
def test_models_that_do_not_fit_are_refused(folder, build, message):
    with pytest.raises(ValueError, match=message):
        export_gptq(build(), folder)


def test_generation_config_that_cannot_be_saved_is_found_first(folder):
    model = pack(tiny.llama(**SIZES))
    model.generation_config.top_k = 7  # without do_sample
    with pytest.raises(ValueError, match="do_sample"):
        export_gptq(model, folder)
    assert not folder.exists()


def test_folder_in_use_is_refused(folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not an empty folder"):
        export_gptq(pack(tiny.llama(**SIZES)), folder)
    assert json.loads((folder / "config.json").read_text()) == {}


@pytest.mark.parametrize("bits, zero, codes", KINDS)
def test_gptqmodel_reads_the_same_weight(bits, zero, codes):
    reader = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    weight, sym = packed_weight((64, 256), bits, 64, zero, codes), zero is not None
    layer = reader.TorchLinear(
        bits=bits, group_size=64, sym=sym, desc_act=False, in_features=256, out_features=64, bias=False
    )
    layer.load_state_dict(gptq_tensors(weight, subtract_one=sym))
    if sym:
        convert_gptq_v1_to_v2_format_module(layer, bits=bits, pack_dtype=torch.int32)
    found = layer.eval().dequantize_weight().T
    assert_matches(found.half(), dequantize(weight, torch.float16), "exact")
