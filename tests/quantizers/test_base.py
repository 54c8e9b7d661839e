"""The whole contract of `from_pretrained(..., quantization_config=...)`, on every family the engine knows."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

import hf_ext
from hf_ext import CatQConfig, LittleBit2Config, OSAQConfig
from hf_ext.core.modules import named_linears
from hf_ext.ops.low_bit_linear import force_backend
from hf_ext.quantizers.packed_linear import PackedLinear
from tests import tiny
from tests.fresh_process import FreshProcesses
from tests.numerics import assert_matches


TOKENS = torch.randint(3, tiny.VOCAB_SIZE, (8, 24), generator=torch.Generator().manual_seed(5))
PROMPT = torch.randint(3, tiny.VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(6))


SHORT = {"preset": "fast", "group_size": 16, "dataset": TOKENS, "epochs": 2, "lora_rank": 4, "batch_size": 4}
# Every method in the forms that are stored differently.
METHODS = {
    **{f"osaq {n} bits": (OSAQConfig, {"bits": n, "group_size": 16, "dataset": TOKENS}) for n in (2, 3, 4, 8)},
    "catq": (CatQConfig, SHORT),
    "catq 8-bit activations": (CatQConfig, {**SHORT, "activation_bits": 8}),
    "littlebit2": (LittleBit2Config, {"bits": 1.0}),
    "littlebit2 one path": (LittleBit2Config, {"bits": 1.0, "residual": False}),
    "littlebit2 trainable": (LittleBit2Config, {"bits": 1.0, "trainable": True}),
}
ONE_OF_EACH = ("osaq 3 bits", "catq", "littlebit2")


def config(**options):
    return OSAQConfig(**{"bits": 3, "group_size": 16, "dataset": TOKENS, **options})


def config_of(method, **options):
    kind, given = METHODS[method]
    return kind(**{**given, **options})


def logits(model):
    with torch.no_grad():
        return model(PROMPT.to(model.device)).logits


def linear_names(model):
    return {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def save_and_load(model, folder, **options):
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.fixture
def saved(tiny_llama, tmp_path):
    """A quantized tiny Llama on disk, and its logits."""
    hf_ext.quantize(tiny_llama, config())
    tiny_llama.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved", logits(tiny_llama)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", tiny.MODELS)
def test_reload_is_equal_to_the_bit_twice_over(tiny_model, tmp_path, family, method):
    model = tiny_model(family)
    embedding = model.get_input_embeddings().weight.detach().clone()
    report = hf_ext.quantize(model, config_of(method))
    assert linear_names(model) == {layer.name for layer in report.layers if layer.status == "quantized"}
    expected = logits(model)
    first = save_and_load(model, tmp_path / "first")
    assert_matches(logits(first), expected, "exact")
    assert linear_names(first) == linear_names(model)
    second = save_and_load(first, tmp_path / "second")
    assert_matches(logits(second), expected, "exact")
    # peers 13, 14: the embedding, often the head's own storage, is left alone, and a tied head is saved once
    assert_matches(second.get_input_embeddings().weight, embedding, "exact")
    assert second.config.tie_word_embeddings == model.config.tie_word_embeddings
    stored = load_file(tmp_path / "second" / "model.safetensors")
    head = [name for name in stored if "lm_head" in name or "embed_out" in name]
    assert len(head) == (0 if model.config.tie_word_embeddings else 1)
    for name, tensor in stored.items():
        assert tensor.dtype == torch.uint8 or torch.isfinite(tensor).all(), name


@pytest.mark.parametrize("method", ONE_OF_EACH)
@pytest.mark.parametrize("family", tiny.MODELS)
def test_dequantize_gives_a_plain_model_that_reloads(tiny_model, tmp_path, family, method):
    """peers 23: no quantization_config left, the original linear classes, and a reload without hf_ext's layers."""
    plain = tiny_model(family)
    model = copy.deepcopy(plain)
    hf_ext.quantize(model, config_of(method))
    with force_backend("reference"):
        expected = logits(model)
    model = model.dequantize()
    # The products of factors are summed in another order than those of the dense weight.
    assert_matches(logits(model), expected, "model" if method == "littlebit2" else "exact")
    assert not hasattr(model.config, "quantization_config")
    assert {name: type(m) for name, m in named_linears(model)} == {name: type(m) for name, m in named_linears(plain)}
    assert model.state_dict().keys() == plain.state_dict().keys()
    again = save_and_load(model, tmp_path)
    assert not linear_names(again)
    assert_matches(logits(again), logits(model), "exact")
    hf_ext.quantize(again, config_of(method))  # and it can be quantized again


@pytest.mark.parametrize("method", METHODS)
def test_from_pretrained_and_quantize_leave_the_same_model(tiny_llama, tmp_path, method):
    """peers 3: both set the config and the quantizer that save_pretrained needs."""
    tiny_llama.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config_of(method))
    report = hf_ext.quantize(tiny_llama, config_of(method))
    assert_matches(logits(loaded), logits(tiny_llama), "exact")
    assert loaded.config.to_dict()["quantization_config"] == tiny_llama.config.to_dict()["quantization_config"]
    assert loaded.is_quantized and tiny_llama.is_quantized
    assert loaded.hf_quantizer.report.to_dict()["layers"] == report.to_dict()["layers"]
    kept = loaded.config.quantization_config
    assert getattr(kept, "dataset", None) is None, "the calibration data must not live on in the model"


@pytest.fixture(scope="module")
def fresh():
    with FreshProcesses("torch._dynamo") as processes:
        yield processes


LOAD = """
import torch
{imports}
from transformers import AutoModelForCausalLM
from safetensors.torch import load_file
model = AutoModelForCausalLM.from_pretrained({folder!r})
given = load_file({expected!r})
with torch.no_grad():
    assert torch.equal(model(given["prompt"]).logits, given["logits"])
assert model.generate(given["prompt"], max_new_tokens=3, do_sample=False).shape[1] == given["prompt"].shape[1] + 3
"""


@pytest.mark.parametrize("method", ONE_OF_EACH)
@pytest.mark.parametrize("imports", ["import hf_ext", "import transformers, hf_ext"])
def test_a_fresh_process_loads_the_same_model(tiny_llama, tmp_path, fresh, imports, method):
    folder = tmp_path / "saved"
    hf_ext.quantize(tiny_llama, config_of(method))
    tiny_llama.save_pretrained(folder)
    save_file({"prompt": PROMPT, "logits": logits(tiny_llama)}, tmp_path / "expected.safetensors")
    fresh.run(LOAD.format(imports=imports, folder=str(folder), expected=str(tmp_path / "expected.safetensors")))


def test_a_checkpoint_says_what_it_needs(saved, fresh):
    """peers 1: without hf_ext Transformers only warns; the stored config must at least name the import."""
    folder, _ = saved
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "osaq"
    assert "import hf_ext" in stored["library"]
    assert "dataset" not in stored and "tokenizer" not in stored
    code = f"from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    assert "Unknown quantization type, got osaq" in fresh.run(code)


def test_sharded_checkpoints(tiny_llama, tmp_path):
    hf_ext.quantize(tiny_llama, config())
    expected = logits(tiny_llama)
    tiny_llama.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_matches(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected, "exact")


@pytest.mark.parametrize("options", [{"device_map": "auto"}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}])
def test_device_map(saved, options):
    folder, expected = saved
    assert_matches(logits(AutoModelForCausalLM.from_pretrained(folder, **options)), expected, "exact")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_override_keeps_the_scales(saved, dtype):
    """peers 11: scales are fp32 in the file, in memory and after a cast, whatever the activations are."""
    folder, expected = saved
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert model.dtype == dtype and logits(model).dtype == dtype
    assert torch.isfinite(logits(model)).all()
    reference = AutoModelForCausalLM.from_pretrained(folder)
    cast = copy.deepcopy(reference).to(dtype)
    for name in linear_names(model):
        scale = reference.get_submodule(name).weight_scale
        for other in (model, cast):
            assert_matches(other.get_submodule(name).weight_scale, scale, "exact")
    assert torch.isfinite(logits(cast)).all()
    error = (logits(model).float() - expected).norm() / expected.norm()
    plain = copy.deepcopy(reference).dequantize()
    plain_error = (logits(plain.to(dtype)).float() - expected).norm() / expected.norm()
    assert error <= 2 * plain_error, "rounding twice as much as the dequantized model in this dtype"


def test_generation_config_travels(tiny_llama, tmp_path):
    tiny_llama.generation_config = GenerationConfig(max_new_tokens=7, eos_token_id=2)
    hf_ext.quantize(tiny_llama, config())
    assert save_and_load(tiny_llama, tmp_path).generation_config.max_new_tokens == 7


def test_modules_to_not_convert_adds_to_the_defaults(tiny_model, tmp_path):
    """peers 15: a user's list must not put the head up for quantization."""
    model = tiny_model("qwen3")
    report = hf_ext.quantize(model, config(modules_to_not_convert=["down_proj", r"model.layers.1.self_attn.*"]))
    names = linear_names(model)
    assert not any("down_proj" in name or "lm_head" in name or "layers.1.self_attn" in name for name in names)
    assert any("gate_proj" in name for name in names)
    skipped = {layer.name: layer.note for layer in report.layers if layer.status == "skipped"}
    assert skipped["model.layers.0.mlp.down_proj"] == "named in modules_to_not_convert"
    assert skipped["lm_head"] == "outside the decoder blocks"
    expected = logits(model)
    again = save_and_load(model, tmp_path)
    assert linear_names(again) == names
    assert_matches(logits(again), expected, "exact")


@pytest.mark.parametrize("method", ONE_OF_EACH)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_may_stay_float(tiny_model, tmp_path, family, method):
    model = tiny_model(family)
    hf_ext.quantize(model, config_of(method, modules_to_not_convert=["experts"]))
    assert linear_names(model) and not any("experts" in name for name in linear_names(model))
    expected = logits(model)
    assert_matches(logits(save_and_load(model, tmp_path)), expected, "exact")


def test_experts_without_tokens_are_rounded_and_named(tiny_model):
    """peers 19: four rows of three tokens cannot reach every expert of both blocks."""
    model = tiny_model("mixtral")
    with pytest.warns(UserWarning, match="no calibration token reached it"):
        report = hf_ext.quantize(model, config(dataset=TOKENS[:1, :3]))
    unseen = [layer for layer in report.layers if "no calibration token" in layer.note]
    assert unseen and all(".experts." in layer.name for layer in unseen)
    assert torch.isfinite(logits(model)).all()
    assert len(linear_names(model)) == 24


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_killed_run_resumes_with_the_same_bytes(tiny_model, tmp_path, family, monkeypatch):
    from hf_ext.quantizers.osaq.method import OSAQMethod

    expected = tiny_model(family)
    hf_ext.quantize(expected, config())
    solve = OSAQMethod.solve

    def killed(self, group, linears):
        if "layers.1.self_attn.o_proj" in group:
            raise KeyboardInterrupt
        return solve(self, group, linears)

    checkpoint = config(checkpoint_dir=str(tmp_path / "run"))
    monkeypatch.setattr(OSAQMethod, "solve", killed)
    model = tiny_model(family)
    with pytest.raises(KeyboardInterrupt):
        hf_ext.quantize(model, checkpoint)
    assert not hasattr(model, "hf_quantizer"), "a half-quantized model must not look quantized"
    seen = []
    monkeypatch.setattr(
        OSAQMethod, "solve", lambda self, group, linears: seen.append(group) or solve(self, group, linears)
    )
    resumed = tiny_model(family)
    report = hf_ext.quantize(resumed, checkpoint)
    assert seen and all("layers.1." in group for group in seen), "the finished block was computed again"
    assert resumed.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert_matches(resumed.state_dict()[name], tensor, "exact")
    assert report.count("quantized") == len(linear_names(expected))
    assert not list((tmp_path / "run").glob("*.partial"))


def test_a_checkpoint_of_another_run_is_refused(tiny_llama, tiny_model, tmp_path):
    folder = str(tmp_path / "run")
    hf_ext.quantize(tiny_llama, config(checkpoint_dir=folder))
    for changed in (config(checkpoint_dir=folder, bits=4), config(checkpoint_dir=folder, dataset=TOKENS[:4])):
        with pytest.raises(ValueError, match="belongs to another run: (bits|calibration)="):
            hf_ext.quantize(tiny_model("llama"), changed)
    with pytest.raises(ValueError, match="belongs to another run: model="):
        hf_ext.quantize(tiny.llama(seed=7), config(checkpoint_dir=folder))


def edit_config(folder, **changes):
    path = Path(folder) / "config.json"
    stored = json.loads(path.read_text())
    stored["quantization_config"].update(changes)
    path.write_text(json.dumps(stored))


def test_a_newer_format_is_refused(saved):
    edit_config(saved[0], format_version=99)
    with pytest.raises(ValueError, match="format version 99.*pip install -U hf_ext"):
        AutoModelForCausalLM.from_pretrained(saved[0])


def test_a_truncated_file_is_named(saved):
    path = saved[0] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(OSError, match=r"model\.safetensors is truncated or damaged"):
        AutoModelForCausalLM.from_pretrained(saved[0])


MISFITS = {
    "bits": ({"bits": 4}, r"weight_packed is .* but .*bits=4"),
    "group size": ({"group_size": 8}, r"weight_scale is .* group_size=8"),
    "skipped layers": ({"modules_to_not_convert": ["o_proj"]}, r"does not hold model\.layers\.0\.self_attn\.o_proj"),
}


@pytest.mark.parametrize("changes, words", MISFITS.values(), ids=MISFITS.keys())
def test_a_config_that_does_not_fit_the_tensors_is_refused(saved, changes, words):
    """Transformers would warn and run on random weights."""
    edit_config(saved[0], **changes)
    with pytest.raises(ValueError, match=words):
        AutoModelForCausalLM.from_pretrained(saved[0])


def test_a_missing_tensor_is_named(saved):
    path = saved[0] / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"does not hold model\.layers\.1\.mlp\.up_proj\.weight_scale"):
        AutoModelForCausalLM.from_pretrained(saved[0])


REFUSED = {
    "group too large": ({"group_size": 33}, r"group_size=33 is larger than a row of 12 linears: model\.layers\.0"),
    "nothing left": ({"modules_to_not_convert": ["model.layers"]}, "no linear left"),
    "a pattern that is none": ({"modules_to_not_convert": ["*"]}, r"'\*' is no regular expression"),
    "a pattern that matches nothing": ({"modules_to_not_convert": ["attn.q"]}, "'attn.q' matches no linear"),
    "no data": ({"dataset": None}, "needs calibration data"),
    "text without tokenizer": ({"dataset": ["w1 w2 w3"]}, "tokenizer is needed"),
    "empty data": ({"dataset": [[]]}, "no row of at least 2 tokens"),
    "another vocabulary": ({"dataset": [[1, 2, 999]]}, "another model's tokenizer"),
}


@pytest.mark.parametrize("options, words", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("door", ["quantize", "from_pretrained"])
def test_refused_before_any_work(tiny_llama, tmp_path, options, words, door):
    before = {name: tensor.clone() for name, tensor in tiny_llama.state_dict().items()}
    with pytest.raises((ValueError, TypeError), match=words):
        if door == "quantize":
            hf_ext.quantize(tiny_llama, config(**options))
        else:
            tiny_llama.save_pretrained(tmp_path)
            AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config(**options))
    assert not getattr(tiny_llama, "is_quantized", False) and not hasattr(tiny_llama.config, "quantization_config")
    for name, tensor in tiny_llama.state_dict().items():
        assert_matches(tensor, before[name], "exact")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_are_named(tiny_model, value):
    model = tiny_model("mixtral")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2, 3, 4] = value
    names = set(model.state_dict())
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\.down_proj holds NaN or infinite"):
        hf_ext.quantize(model, config())
    assert set(model.state_dict()) == names


def test_fewer_tokens_than_columns_warns_of_the_null_space(tiny_llama, caplog):
    """peers 7: 10 tokens for 64 columns; GPTQ's damping carries it, and the result is finite."""
    with pytest.warns(UserWarning, match="fewer calibration tokens than columns"):
        report = hf_ext.quantize(tiny_llama, config(dataset=TOKENS[:1, :10]))
    assert "Use at least 512 tokens" in caplog.text
    assert torch.isfinite(logits(tiny_llama)).all()
    assert all("fewer calibration tokens" in layer.note for layer in report.layers if layer.status == "quantized")


def test_a_dead_input_channel(tiny_llama):
    """peers 7: an input that is always zero has no curvature; its weights must come out finite and cost nothing."""
    with torch.no_grad():
        tiny_llama.model.layers[0].input_layernorm.weight[5] = 0
        tiny_llama.model.layers[1].mlp.up_proj.weight[7] = 0  # a dead output: column 7 of down_proj never lives
    hf_ext.quantize(tiny_llama, config())
    assert torch.isfinite(logits(tiny_llama)).all()
    for name in linear_names(tiny_llama):
        assert torch.isfinite(tiny_llama.get_submodule(name).dequantize()).all(), name


def test_quantizing_twice_is_refused(tiny_llama):
    hf_ext.quantize(tiny_llama, config())
    with pytest.raises(ValueError, match="already quantized with 'osaq'"):
        hf_ext.quantize(tiny_llama, config())


def test_weights_offloaded_to_disk_are_refused_before_work(tiny_llama, tmp_path):
    """peers 22."""
    tiny_llama.save_pretrained(tmp_path / "model")
    device_map = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    with pytest.raises(ValueError, match=r"offloaded to disk, model\.layers\.1"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "off", quantization_config=config()
        )


def test_fused_experts_of_an_unknown_layout_are_refused_by_name(tiny_model):
    """peers 18: never 'done' with the experts left in float."""
    model = tiny_model("mixtral")
    model.model.layers[1].mlp.experts.is_transposed = True
    with pytest.raises(
        ValueError, match=r"'model\.layers\.1\.mlp\.experts' \(MixtralExperts\).*modules_to_not_convert"
    ):
        hf_ext.quantize(model, config())


@pytest.mark.parametrize("options, words", [
    ({"group_sise": 64}, "has no option 'group_sise'. Did you mean 'group_size'"),
    ({"bits": 5}, "bits=5; allowed are 2, 3, 4, 8"),
    ({"group_size": 0}, "group_size=0; allowed are"),
    ({"rounding": "gtpq"}, "rounding='gtpq' is unknown. Did you mean 'gptq'"),
    ({"max_null_ratio": 1.0}, "max_null_ratio=1.0; allowed"),
    ({"gamma": -0.1}, "gamma=-0.1; allowed"),
    ({"mu1": 0}, "mu1=0; allowed"),
    ({"modules_to_not_convert": "lm_head"}, r"write a list: \['lm_head'\]"),
])  # fmt: skip
def test_bad_options(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        OSAQConfig(**options)


def test_the_config_round_trips_through_json():
    given = config(modules_to_not_convert=["down_proj"], gamma=0.02, tokenizer="name")
    again = OSAQConfig.from_dict(json.loads(given.to_json_string()))
    assert again.to_dict() == given.to_dict()
    assert again.tokenizer is None and again.gamma == 0.02


def test_a_full_disk_does_not_spoil_the_run(tiny_llama, tmp_path, monkeypatch):
    """A checkpoint that cannot be written stops the run with the system's error; what was written stays whole."""
    import hf_ext.quantizers.checkpoint as checkpoint

    written = []

    def full(tensors, path, metadata):
        if written:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        written.append(path)
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(checkpoint, "save_file", full)
    folder = tmp_path / "run"
    original = copy.deepcopy(tiny_llama)
    with pytest.raises(OSError, match="No space left"):
        hf_ext.quantize(tiny_llama, config(checkpoint_dir=str(folder)))
    monkeypatch.undo()
    assert len(list(folder.glob("block-*.safetensors"))) == 1
    expected = copy.deepcopy(original)
    hf_ext.quantize(expected, config())
    hf_ext.quantize(original, config(checkpoint_dir=str(folder)))
    assert_matches(logits(original), logits(expected), "exact")
    shutil.rmtree(folder)


@pytest.mark.parametrize("pattern", ["mlp", "layers.0", "layers.0.mlp", "model.layers.1", ".*self_attn"])
def test_a_pattern_keeps_all_that_a_module_holds(tiny_llama, tmp_path, pattern):
    report = hf_ext.quantize(tiny_llama, config(modules_to_not_convert=[pattern]))
    named = [layer.name for layer in report.layers if layer.note == "named in modules_to_not_convert"]
    part = pattern.removeprefix(".*").removeprefix("model.")
    assert named and all(f".{part}." in f".{name}" for name in named)
    assert not any(f".{part}." in f".{name}" for name in linear_names(tiny_llama))
    expected = logits(tiny_llama)
    assert_matches(logits(save_and_load(tiny_llama, tmp_path)), expected, "exact")


def test_a_stopped_run_on_experts_gives_the_fused_model_back(tiny_model, monkeypatch):
    """Before anything is quantized, an error must not leave experts in a form that saves but does not load."""
    model = tiny_model("mixtral")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def refuse(*args):
        raise ValueError("depends on the tokens")

    monkeypatch.setattr("hf_ext.quantizers.activations._refuse_data_dependence", refuse)
    with pytest.raises(ValueError, match="depends on the tokens"):
        hf_ext.quantize(model, config())
    assert model.state_dict().keys() == before.keys()
    for name, tensor in model.state_dict().items():
        assert_matches(tensor, before[name], "exact")


def test_a_half_quantized_model_is_refused(tiny_llama, monkeypatch):
    from hf_ext.quantizers.osaq.method import OSAQMethod

    solve = OSAQMethod.solve

    def stop(self, group, linears):
        if "layers.1" in group:
            raise KeyboardInterrupt
        return solve(self, group, linears)

    monkeypatch.setattr(OSAQMethod, "solve", stop)
    with pytest.raises(KeyboardInterrupt):
        hf_ext.quantize(tiny_llama, config())
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"model\.layers\.0.* is low-bit already: an earlier run .* was stopped"):
        hf_ext.quantize(tiny_llama, config(bits=4))


def test_the_two_doors_do_not_share_a_checkpoint(tiny_llama, tiny_model, tmp_path):
    hf_ext.quantize(tiny_llama, config(checkpoint_dir=str(tmp_path)))
    with pytest.raises(ValueError, match="belongs to another run: method='OSAQ'"):
        hf_ext.absorb_outliers(tiny_model("llama"), config(checkpoint_dir=str(tmp_path)))


def test_one_changed_weight_or_setting_is_another_model(tiny_llama, tiny_model, tmp_path):
    hf_ext.quantize(tiny_llama, config(checkpoint_dir=str(tmp_path)))
    edited, configured = tiny_model("llama"), tiny_model("llama")
    with torch.no_grad():
        edited.model.layers[1].mlp.up_proj.weight[3, 5] += 0.5
    configured.config.rms_norm_eps = 0.1
    for model in (edited, configured):
        with pytest.raises(ValueError, match="belongs to another run: model="):
            hf_ext.quantize(model, config(checkpoint_dir=str(tmp_path)))


def test_a_damaged_block_is_named(tiny_llama, tiny_model, tmp_path):
    hf_ext.quantize(tiny_llama, config(checkpoint_dir=str(tmp_path)))
    block = tmp_path / "block-00000.safetensors"
    block.write_bytes(block.read_bytes()[:-50])
    with pytest.raises(OSError, match="block-00000.safetensors is truncated or damaged.*Delete it"):
        hf_ext.quantize(tiny_model("llama"), config(checkpoint_dir=str(tmp_path)))


def test_a_model_with_adapters_is_refused(tiny_llama):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(tiny_llama, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="carries an adapter.*merge_and_unload"):
        hf_ext.quantize(adapted.get_base_model(), config())


def test_a_layer_that_never_fires_is_rounded_and_named(tiny_model):
    model = tiny_model("opt")
    with torch.no_grad():
        model.model.decoder.layers[0].fc1.bias.fill_(-1e3)  # behind a ReLU: fc2 sees zeros alone
    with pytest.warns(UserWarning, match="inputs were all zero on the calibration data"):
        hf_ext.quantize(model, config())
    assert model.model.decoder.layers[0].fc2.dequantize().any()


def test_a_block_that_reads_a_weight_itself_is_refused_after_the_first_block(tiny_llama):
    for layer in tiny_llama.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: (args[0].to(module.up_proj.weight.dtype),))
    with pytest.raises(ValueError, match="reads a weight directly.*modules_to_not_convert"):
        hf_ext.quantize(tiny_llama, config())


def test_rows_are_cut_at_the_positions_a_model_has(tiny_model):
    report = hf_ext.quantize(tiny_model("gpt2"), config(dataset=[[3 + i % 50 for i in range(400)]]))
    assert report.calibration_tokens == 128


WRONG_TYPES = {"desc_act": "no", "token_normalize": "False", "bits": 3.0, "group_size": True, "batch_size": 2.5,
               "refine_sweeps": 1.5, "mu1": float("inf"), "gamma": "0.1", "seed": "x"}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_values_of_a_wrong_type_are_refused(name):
    with pytest.raises(TypeError, match=f"{name}={WRONG_TYPES[name]!r}.*allowed is"):
        OSAQConfig(**{name: WRONG_TYPES[name]})
