"""`hf-ext export` writes files that other readers load, whole or not at all."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_ext
from hf_ext.cli.export import FORMATS
from hf_ext.quantizers.export.blocks import FORMATS as BLOCKS
from tests import tiny
from tests.numerics import assert_matches
from tests.quantizers.export.packed_models import SIZES, dequantized, pack, packed_weight
from tests.quantizers.export.test_gguf_tokenizer import byte_level


INPUT_IDS = torch.arange(4, 24)[None]


@pytest.fixture
def ternary(tmp_path):
    """A saved checkpoint of hf_ext with ternary weights, a scale for 256 columns."""
    folder = tmp_path / "ternary"
    tokenizer = byte_level()
    model = pack(tiny.llama(**SIZES, vocab_size=len(tokenizer)))
    config = hf_ext.OSAQConfig(bits=2, group_size=256, rounding="rtn", dataset=["the quick brown fox"] * 8)
    config.tokenizer, config.num_samples, config.sequence_length = tokenizer, 2, 4
    quantized = tiny.llama(**SIZES, vocab_size=len(tokenizer))
    hf_ext.quantize(quantized, config)
    quantized.load_state_dict(model.state_dict())
    quantized.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def logits(model):
    with torch.no_grad():
        return model(INPUT_IDS).logits


def test_formats_are_those_of_the_library():
    assert set(FORMATS) == {f"gguf-{name.replace('_g64', '-g64')}" for name in BLOCKS} | {"gptq"}


@pytest.mark.parametrize("format", [format for format in FORMATS if format != "gptq"])
def test_writes_gguf(run, ternary, tmp_path, format):
    out = tmp_path / "model.gguf"
    result = run("export", ternary, "--format", format, "-o", out, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data == {
        "output": str(out),
        "format": format,
        "file_bytes": out.stat().st_size,
        "weights": 14,
        "largest_relative_error": 0.0,
        "lossy_weights": [],
    }
    if "-tq" in format:
        expected = dequantized(AutoModelForCausalLM.from_pretrained(ternary))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=out.name, dtype=torch.float32)
        assert_matches(logits(loaded), logits(expected), "exact")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=out.name)
        assert tokenizer.decode(tokenizer("the quick")["input_ids"]) == "the quick"


def test_writes_gptq(run, ternary, tmp_path):
    out = tmp_path / "gptq"
    result = run("export", ternary, "--format", "gptq", "-o", out)
    assert result.exit_code == 0, result.output
    assert "14 packed weights" in result.stdout and "gptq" in result.stdout
    settings = AutoConfig.from_pretrained(out).quantization_config
    assert (settings["quant_method"], settings["bits"], settings["sym"]) == ("gptq", 2, True)
    assert AutoTokenizer.from_pretrained(out)("the quick")["input_ids"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gptq", "ternary"]


def test_lossy_export_says_what_was_lost(run, ternary, tmp_path, monkeypatch):
    out = tmp_path / "model.gguf"
    model = AutoModelForCausalLM.from_pretrained(ternary)
    layer = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = type(layer).from_packed(
        layer.to_float(), packed_weight((256, 512), group_size=128)
    )
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: model)
    refused = run("export", ternary, "--format", "gguf-tq2_0", "-o", out)
    assert refused.exit_code == 2
    assert "model.layers.0.mlp.down_proj has a scale for 128 columns" in refused.stderr
    assert len(refused.stderr.splitlines()) == 2 and not out.exists()
    with pytest.warns(UserWarning):
        result = run("export", ternary, "--format", "gguf-tq2_0", "-o", out, "--allow-lossy", "--json")
    data = json.loads(result.stdout)
    assert data["lossy_weights"] == ["model.layers.0.mlp.down_proj"]
    assert 0.1 < data["largest_relative_error"] < 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "gguf-tq20", "-o", "x.gguf"], "Did you mean 'gguf-tq2_0'?"),
        (["--format", "gptq", "-o", "x", "--allow-lossy"], "--allow-lossy is for GGUF"),
        (["--format", "gguf-tq2_0", "-o", "."], "is a folder"),
        (["--format", "gguf-tq2_0", "-o", "absent/x.gguf"], "cannot write"),
        (["--format", "gguf-tq2_0"], "Missing option '--output'"),
        (["-o", "x"], "Missing option '--format'"),
    ],
)
def test_usage_errors_come_before_the_model_is_looked_for(run, arguments, message):
    result = run("export", "no-such/model", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("format", ["gguf-tq2_0", "gptq"])
def test_what_is_there_is_replaced_only_when_asked_for(run, ternary, tmp_path, format):
    out = tmp_path / "out"
    arguments = ["export", ternary, "--format", format, "-o", out]
    assert run(*arguments).exit_code == 0
    again = run(*arguments)
    assert again.exit_code == 2 and "--overwrite" in again.stderr
    assert run(*arguments, "--overwrite").exit_code == 0


def test_float_model_is_refused(run, model_folder, tmp_path):
    result = run("export", model_folder, "--format", "gptq", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "is not quantized; export takes a model that `hf-ext quantize` saved" in result.stderr


def test_model_that_does_not_fit_is_a_usage_error(run, ternary, tmp_path, tiny_tokenizer):
    arguments = ["export", ternary, "--format", "gguf-tq2_0", "-o", tmp_path / "x.gguf"]
    tiny_tokenizer.save_pretrained(ternary)
    result = run(*arguments)
    assert result.exit_code == 2
    assert "is a WordLevel tokenizer" in result.stderr and "Loading" not in result.stderr
    byte_level().save_pretrained(ternary)
    model = AutoModelForCausalLM.from_pretrained(ternary)
    model.model.layers[0].mlp.down_proj.packed.zero.fill_(2)
    model.save_pretrained(ternary)
    result = run(*arguments)
    assert result.exit_code == 2
    assert "model.layers.0.mlp.down_proj is not ternary (2 bits)" in result.stderr
    assert not (tmp_path / "x.gguf").exists()


def test_codes_of_more_bits_go_to_gptq(run, quantize_arguments, tmp_path):
    assert run(*quantize_arguments, "--bits", 4).exit_code == 0
    result = run("export", tmp_path / "out", "--format", "gptq", "-o", tmp_path / "gptq", "--json")
    assert result.exit_code == 0, result.output
    settings = AutoConfig.from_pretrained(tmp_path / "gptq").quantization_config
    assert (settings["bits"], settings["sym"], settings["format"]) == (4, False, "gptq_v2")
    assert 0 < json.loads(result.stdout)["largest_relative_error"] <= 2**-11
