"""LittleBit-2 behind `from_pretrained` and `quantize`: packed, and ready to train."""

import copy
import json
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_ext
from hf_ext.core.modules import linear_shape, named_linears, weight_of
from hf_ext.ops.factored_binary_linear import choose_factored_backend
from hf_ext.ops.low_bit_linear import force_backend
from hf_ext.quantizers.littlebit2 import LittleBit2Config, pack
from hf_ext.quantizers.littlebit2.functional import bits_per_weight, factorize
from hf_ext.quantizers.littlebit2.layer import FactoredBinaryLinear, LatentBinaryLinear
from hf_ext.quantizers.littlebit2.method import LittleBit2Method
from tests import tiny
from tests.fresh_process import FreshProcesses
from tests.numerics import assert_matches


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is an initialisation"),
    pytest.mark.filterwarnings("ignore:LittleBit-2. the smallest rank"),
]

PROMPT = torch.randint(3, tiny.VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(6))
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}  # ranks above the minimum at 1 bit
MODES = {"packed": {}, "trainable": {"trainable": True}}
LAYERS = (FactoredBinaryLinear, LatentBinaryLinear)


def config(**options):
    return LittleBit2Config(**{"bits": 1.0, **options})


def logits(model):
    with torch.no_grad():
        return model(PROMPT).logits


def layers_of(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, LAYERS)}


def save_and_load(model, folder, **options):
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.fixture(params=MODES.values(), ids=MODES.keys())
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def wide_llama():
    return tiny.llama(**WIDE)


@pytest.mark.parametrize("rotation", ["none", "random", "joint_itq"])
def test_weights_that_the_form_holds_stay_as_they_are(tiny_llama, rotation):
    """The null setting: one path, and weights of rank one."""
    with torch.no_grad():
        for _, linear in named_linears(tiny_llama.model):
            linear.weight.copy_(torch.outer(linear.weight[:, 0], linear.weight[0]))
    expected = logits(tiny_llama)
    report = hf_ext.quantize(tiny_llama, config(rank=1, residual=False, rotation=rotation, trainable=True))
    assert_matches(logits(tiny_llama), expected, "model")
    # packed, their scales are rounded to bfloat16
    assert all(layer.metrics["weight_error"] < 4e-3 for layer in report.layers if layer.status == "quantized")


@pytest.mark.parametrize("family", tiny.MODELS)
def test_reload_is_equal_to_the_bit_twice_over(tiny_model, tmp_path, family, mode):
    model = tiny_model(family)
    embedding = model.get_input_embeddings().weight.detach().clone()
    report = hf_ext.quantize(model, config(**mode))
    assert layers_of(model).keys() == {layer.name for layer in report.layers if layer.status == "quantized"}
    expected = logits(model)
    first = save_and_load(model, tmp_path / "first")
    assert_matches(logits(first), expected, "exact")
    second = save_and_load(first, tmp_path / "second")
    assert_matches(logits(second), expected, "exact")
    assert second.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert_matches(second.state_dict()[name], tensor, "exact")
    assert_matches(second.get_input_embeddings().weight, embedding, "exact")
    stored = load_file(tmp_path / "second" / "model.safetensors")
    head = [name for name in stored if "lm_head" in name or "embed_out" in name]
    assert len(head) == (0 if model.config.tie_word_embeddings else 1)


@pytest.mark.parametrize("family", tiny.MODELS)
def test_dequantize_gives_a_plain_model_that_reloads(tiny_model, tmp_path, family, mode):
    plain = tiny_model(family)
    model = copy.deepcopy(plain)
    hf_ext.quantize(model, config(**mode))
    with force_backend("reference"):
        expected = logits(model)
    model = model.dequantize()
    assert_matches(logits(model), expected, "model" if mode else "exact")
    assert not hasattr(model.config, "quantization_config")
    assert {name: type(m) for name, m in named_linears(model)} == {name: type(m) for name, m in named_linears(plain)}
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert_matches(logits(save_and_load(model, tmp_path)), logits(model), "exact")


def test_from_pretrained_and_quantize_leave_the_same_model(tiny_llama, tmp_path, mode):
    tiny_llama.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config(**mode))
    report = hf_ext.quantize(tiny_llama, config(**mode))
    assert_matches(logits(loaded), logits(tiny_llama), "exact")
    assert loaded.config.to_dict()["quantization_config"] == tiny_llama.config.to_dict()["quantization_config"]
    assert loaded.hf_quantizer.report.to_dict()["layers"] == report.to_dict()["layers"]
    assert loaded.hf_quantizer.is_qat_trainable == tiny_llama.hf_quantizer.is_qat_trainable == bool(mode)
    frozen = [{name for name, p in m.named_parameters() if not p.requires_grad} for m in (loaded, tiny_llama)]
    assert frozen[0] >= {"model.embed_tokens.weight", "lm_head.weight"} or not mode
    assert frozen[0] == frozen[1] or not mode


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


@pytest.mark.parametrize("imports, mode", [
    ("import hf_ext", MODES["packed"]),
    ("import transformers, hf_ext", MODES["trainable"]),
])  # fmt: skip
def test_a_fresh_process_loads_the_same_model(tiny_llama, tmp_path, fresh, imports, mode):
    hf_ext.quantize(tiny_llama, config(**mode))
    tiny_llama.save_pretrained(tmp_path / "saved")
    save_file({"prompt": PROMPT, "logits": logits(tiny_llama)}, tmp_path / "expected.safetensors")
    expected = str(tmp_path / "expected.safetensors")
    fresh.run(LOAD.format(imports=imports, folder=str(tmp_path / "saved"), expected=expected))


@pytest.mark.parametrize("options", [{"residual": False}, {}, {"residual": False, "bits": 0.55}])
def test_the_file_is_as_large_as_the_formula_says(wide_llama, tmp_path, options):
    model = copy.deepcopy(wide_llama)
    shapes = {name: linear_shape(linear) for name, linear in named_linears(model)}
    report = hf_ext.quantize(model, config(**options))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    above_minimum = 0
    for layer in report.layers:
        if layer.status == "skipped":
            continue
        parts = ("u_signs", "v_signs", "out_scale", "latent_scale", "in_scale")
        module = model.get_submodule(layer.name)
        size = sum(stored[f"{layer.name}.{part}"].nbytes for part in parts)
        expected = bits_per_weight(*shapes[layer.name], module.rank, module.paths)
        assert size * 8 == expected * layer.shape[0] * layer.shape[1], "ranks are whole bytes: no bit is lost"
        assert layer.metrics["bits_per_weight"] == layer.metrics["stored_bits_per_weight"] == expected
        above_minimum += expected <= model.config.quantization_config.bits
        assert (expected > model.config.quantization_config.bits) == ("smallest rank" in layer.note)
    assert above_minimum >= 2
    assert set(stored) & {f"{layer.name}.weight" for layer in report.layers if layer.status != "skipped"} == set()


def test_ranks_that_fill_no_byte_are_told_as_stored(wide_llama):
    report = hf_ext.quantize(copy.deepcopy(wide_llama), config(residual=False, rank_multiple=1, bits=0.9))
    metrics = next(layer.metrics for layer in report.layers if layer.name.endswith("layers.0.mlp.up_proj"))
    assert metrics["bits_per_weight"] <= 0.9 < metrics["stored_bits_per_weight"]


def test_the_smallest_rank_is_named_with_its_bits(wide_llama):
    with pytest.warns(
        UserWarning, match=r"the smallest rank, 8, takes 0\.\d+ bits a weight, above bits=0\.1: .*q_proj"
    ):
        report = hf_ext.quantize(copy.deepcopy(wide_llama), config(bits=0.1))
    note = next(layer.note for layer in report.layers if layer.name.endswith("layers.0.self_attn.q_proj"))
    assert f"{bits_per_weight(128, 128, 8, 2):.3g}" in note
    assert note in str(report)


def test_the_metrics_are_what_they_say(wide_llama):
    model = copy.deepcopy(wide_llama)
    weights = {name: weight_of(linear).clone() for name, linear in named_linears(model)}
    report = hf_ext.quantize(model, config(residual=False))
    for layer in report.layers:
        if layer.status == "quantized":
            weight = weights[layer.name]
            error = (weight - model.get_submodule(layer.name).dequantize()).norm() / weight.norm()
            assert_matches(torch.tensor(layer.metrics["weight_error"]), error, "fp32")
            assert 0.6 < layer.metrics["row_efficiency"] < 1
    assert report.calibration_tokens == 0


def test_the_start_is_the_factorization_of_every_weight(wide_llama):
    model = copy.deepcopy(wide_llama)
    weight = weight_of(model.model.layers[1].mlp.down_proj).clone()
    hf_ext.quantize(model, config(seed=3, rotation="random", trainable=True))
    layer = model.model.layers[1].mlp.down_proj
    expected = factorize(weight, layer.rank, rotation="random", generator=torch.Generator().manual_seed(3))
    assert_matches(layer.dequantize(), sum(path.to_dense() for path in expected), "exact")
    assert_matches(layer.V[1].detach(), expected[1].V, "exact")


def test_key_and_value_projections_may_have_more(wide_llama):
    ranks = {}
    for factor in (1.0, 2.0):
        model = copy.deepcopy(wide_llama)
        hf_ext.quantize(model, config(residual=False, kv_factor=factor))
        ranks[factor] = {name: layer.rank for name, layer in layers_of(model).items()}
    for name, rank in ranks[1.0].items():
        more = name.endswith(("k_proj", "v_proj"))
        assert ranks[2.0][name] > rank if more else ranks[2.0][name] == rank


def test_the_seed_decides_and_the_global_generator_is_left_alone(tiny_model):
    state = torch.random.get_rng_state()
    first, again, other = (tiny_model("llama") for _ in range(3))
    for model, seed in ((first, 0), (again, 0), (other, 1)):
        hf_ext.quantize(model, config(seed=seed))
    assert_matches(torch.random.get_rng_state(), state, "exact")
    assert_matches(logits(first), logits(again), "exact")
    assert not torch.equal(logits(first), logits(other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_leaves_scales_and_factors(tiny_llama, tmp_path, dtype, mode):
    hf_ext.quantize(tiny_llama, config(**mode))
    expected = {
        f"{name}.{part}": tensor.clone()
        for name, layer in layers_of(tiny_llama).items()
        for part, tensor in layer.state_dict().items()
    }
    tiny_llama.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for model in (loaded, copy.deepcopy(tiny_llama).to(dtype)):
        assert model.dtype == dtype and logits(model).dtype == dtype
        assert torch.isfinite(logits(model)).all()
        for name, tensor in expected.items():
            assert_matches(model.state_dict()[name], tensor, "exact")
    # and a model saved in that dtype is the same again
    again = save_and_load(loaded, tmp_path / "again")
    assert again.dtype == dtype
    assert_matches(logits(again), logits(loaded), "exact")


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs AVX2 or AVX512")
def test_a_few_rows_in_bfloat16_take_the_kernel(tiny_llama):
    hf_ext.quantize(tiny_llama, config())
    model = tiny_llama.to(torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    assert choose_factored_backend(4, torch.bfloat16, "cpu", layer.cpu_weight()).name == "int4"
    hidden_states = torch.randn(4, tiny.HIDDEN_SIZE).bfloat16()
    expected = hidden_states.double() @ layer.dequantize(torch.float64).T
    assert_matches(layer(hidden_states), expected, "lowp")
    assert "cpu_weight" not in "".join(model.state_dict())


def test_device_map(tiny_llama, tmp_path, mode):
    hf_ext.quantize(tiny_llama, config(**mode))
    expected = logits(tiny_llama)
    assert_matches(logits(save_and_load(tiny_llama, tmp_path, device_map="auto")), expected, "exact")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_killed_run_resumes_with_the_same_bytes(tiny_model, tmp_path, family, monkeypatch, mode):
    expected = tiny_model(family)
    hf_ext.quantize(expected, config(**mode))
    solve = LittleBit2Method.solve

    def killed(self, group, linears):
        if "layers.1.self_attn.o_proj" in group:
            raise KeyboardInterrupt
        return solve(self, group, linears)

    monkeypatch.setattr(LittleBit2Method, "solve", killed)
    checkpoint = config(checkpoint_dir=str(tmp_path / "run"), **mode)
    model = tiny_model(family)
    with pytest.raises(KeyboardInterrupt):
        hf_ext.quantize(model, checkpoint)
    assert not hasattr(model, "hf_quantizer")
    seen = []
    monkeypatch.setattr(
        LittleBit2Method, "solve", lambda self, group, linears: seen.append(group) or solve(self, group, linears)
    )
    resumed = tiny_model(family)
    hf_ext.quantize(resumed, checkpoint)
    assert seen and all("layers.1." in group for group in seen), "the finished block was computed again"
    assert resumed.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert_matches(resumed.state_dict()[name], tensor, "exact")
    for changed in ({"seed": 1}, {"bits": 0.5}):
        with pytest.raises(ValueError, match=f"belongs to another run: {next(iter(changed))}="):
            hf_ext.quantize(tiny_model(family), config(checkpoint_dir=str(tmp_path / "run"), **mode, **changed))


def test_an_adapter_trains_and_reloads_on_top(tiny_llama, tmp_path):
    hf_ext.quantize(tiny_llama, config())
    tiny_llama.save_pretrained(tmp_path / "base")
    torch.manual_seed(3)
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(tiny_llama, adapter).eval()
    adapted(PROMPT, labels=PROMPT).loss.backward()
    grads = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert len(grads) >= 2 * 14 and all("lora_" in name for name in grads)
    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert_matches(logits(again), logits(adapted), "exact")


def test_a_start_warns_that_it_is_one(tiny_llama, tmp_path):
    with pytest.warns(UserWarning, match="is an initialisation: it gives no usable text before distillation"):
        hf_ext.quantize(tiny_llama, config())
    tiny_llama.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="is an initialisation") as found:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len([warning for warning in found if "initialisation" in str(warning.message)]) == 1


def test_a_packed_model_is_what_the_factors_gave(tiny_llama, tmp_path):
    """To the rounding of the scales: with those already in bfloat16, to the last bits of float32."""
    hf_ext.quantize(tiny_llama, config(trainable=True))
    for layer in layers_of(tiny_llama).values():
        with torch.no_grad():
            layer.u2.copy_((layer.u2 * layer.v1).bfloat16())
            layer.v1.fill_(1)
            for scale in (layer.u1, layer.v2):
                scale.copy_(scale.bfloat16())
    expected = logits(tiny_llama)
    tiny_llama.config.quantization_config.trained = True
    packed = pack(tiny_llama)
    assert packed is tiny_llama
    assert_matches(logits(packed), expected, "model")
    assert packed.config.quantization_config.trained and not packed.hf_quantizer.is_qat_trainable
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = save_and_load(packed, tmp_path)
    assert_matches(logits(again), logits(packed), "exact")
    assert {type(layer) for layer in layers_of(again).values()} == {FactoredBinaryLinear}
    assert again.config.quantization_config.trained


def test_packing_without_training_leaves_an_initialisation(tiny_llama, tmp_path):
    hf_ext.quantize(tiny_llama, config(trainable=True))
    with pytest.warns(UserWarning, match="is an initialisation"):
        again = save_and_load(pack(tiny_llama), tmp_path)
    assert not again.config.quantization_config.trained


def test_packing_rounds_scales_and_keeps_signs(tiny_llama):
    hf_ext.quantize(tiny_llama, config(trainable=True))
    dense = {name: layer.dequantize() for name, layer in layers_of(tiny_llama).items()}
    biases = {name: layer.bias for name, layer in layers_of(tiny_llama).items()}
    pack(tiny_llama)
    for name, weight in dense.items():
        layer = tiny_llama.get_submodule(name)
        assert_matches(layer.dequantize(), weight, "lowp")
        assert layer.bias is biases[name] is None or torch.equal(layer.bias, biases[name])


def test_packing_something_else_is_refused(tiny_llama):
    with pytest.raises(ValueError, match="LlamaForCausalLM has no trainable LittleBit-2 layers"):
        pack(tiny_llama)
    hf_ext.quantize(tiny_llama, config())
    with pytest.raises(ValueError, match="no trainable LittleBit-2 layers"):
        pack(tiny_llama)


REFUSED = {
    "a rank too large": ({"rank": 33}, r"rank=33 is larger than a side of \d+ linears: model\.layers\.0.* 1 to 16"),
    "nothing left": ({"modules_to_not_convert": ["model.layers"]}, "no linear left"),
    "a pattern that matches nothing": ({"modules_to_not_convert": ["attn.q"]}, "'attn.q' matches no linear"),
    "a state that is not true": ({"trained": True}, "trained=True is the state of a checkpoint"),
}


@pytest.mark.parametrize("options, words", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("door", ["quantize", "from_pretrained"])
def test_refused_before_any_work(tiny_llama, tmp_path, options, words, door):
    before = copy.deepcopy(tiny_llama.state_dict())
    with pytest.raises(ValueError, match=words):
        if door == "quantize":
            hf_ext.quantize(tiny_llama, config(**options))
        else:
            tiny_llama.save_pretrained(tmp_path)
            AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config(**options))
    assert not getattr(tiny_llama, "is_quantized", False) and not hasattr(tiny_llama.config, "quantization_config")
    for name, tensor in tiny_llama.state_dict().items():
        assert_matches(tensor, before[name], "exact")


def test_quantizing_twice_is_refused(tiny_llama, mode):
    hf_ext.quantize(tiny_llama, config(**mode))
    with pytest.raises(ValueError, match="already quantized with 'littlebit2'"):
        hf_ext.quantize(tiny_llama, config())


@pytest.mark.parametrize("options, words", [
    ({"bit": 0.5}, "has no option 'bit'. Did you mean 'bits'"),
    ({"dataset": ["text"]}, "has no option 'dataset'"),
    ({"bits": 3}, "bits=3; allowed is a number from"),
    ({"bits": 0.0}, r"bits=0\.0; allowed"),
    ({"bits": "1"}, "bits='1'.*a finite number"),
    ({"residual": 1}, "residual=1.*True or False"),
    ({"rotation": "joint-itq"}, "rotation='joint-itq' is unknown. Did you mean 'joint_itq'"),
    ({"sign_gradient": "st"}, "sign_gradient='st' is unknown. Did you mean 'ste'"),
    ({"itq_iterations": -1}, "itq_iterations=-1; allowed"),
    ({"rank": 0}, "rank=0; allowed"),
    ({"rank": 8.0}, r"rank=8\.0 is a float"),
    ({"rank_multiple": 0}, "rank_multiple=0; allowed"),
    ({"min_rank": 0}, "min_rank=0; allowed"),
    ({"kv_factor": -1.0}, "kv_factor=-1.0; allowed"),
    ({"smooth_alpha": 0.0}, "smooth_alpha=0.0; allowed"),
])  # fmt: skip
def test_bad_options(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        LittleBit2Config(**options)


def test_the_config_round_trips_through_json():
    given = config(bits=0.3, rank=16, rotation="none", modules_to_not_convert=["down_proj"], seed=7)
    again = LittleBit2Config.from_dict(json.loads(given.to_json_string()))
    assert again.to_dict() == given.to_dict()
    assert again.seed == 0 and again.rank == 16


def edit_config(folder, **changes):
    stored = json.loads((folder / "config.json").read_text())
    stored["quantization_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(stored))


@pytest.mark.parametrize("changes, words", [
    ({"bits": 0.3}, r"is .* but bits=0\.3.* of the stored quantization_config need"),
    ({"residual": True}, r"is .* but .* of the stored quantization_config need"),
    ({"modules_to_not_convert": ["o_proj"]}, r"does not hold model\.layers\.0\.self_attn\.o_proj"),
    ({"trainable": True}, r"does not hold model\.layers\.0"),
    ({"format_version": 99}, "format version 99"),
])  # fmt: skip
def test_a_config_that_does_not_fit_the_tensors_is_refused(wide_llama, tmp_path, changes, words):
    model = copy.deepcopy(wide_llama)
    hf_ext.quantize(model, config(residual=False))
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=words):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_skipped_layers_stay_float(tiny_model, tmp_path, mode):
    model = tiny_model("qwen3")
    report = hf_ext.quantize(model, config(modules_to_not_convert=["down_proj"], **mode))
    assert not any("down_proj" in name for name in layers_of(model))
    skipped = {layer.name: layer.note for layer in report.layers if layer.status == "skipped"}
    assert skipped["model.layers.0.mlp.down_proj"] == "named in modules_to_not_convert"
    expected = logits(model)
    assert_matches(logits(save_and_load(model, tmp_path)), expected, "exact")


@pytest.mark.parametrize("dims", [(0,), (2, 0, 5)])
def test_layers_take_empty_batches(tiny_llama, dims, mode):
    hf_ext.quantize(tiny_llama, config(**mode))
    layer = tiny_llama.model.layers[0].mlp.up_proj
    assert layer(torch.empty(*dims, tiny.HIDDEN_SIZE)).shape == (*dims, tiny.INTERMEDIATE_SIZE)


def test_the_summary_says_what_the_ranks_come_to(tiny_llama):
    """The smallest ranks take more than was asked for here, and the figure is that of the stored tensors."""
    report = hf_ext.quantize(tiny_llama, config(bits=0.1))
    layers = layers_of(tiny_llama).values()
    bits = 8 * sum(buffer.nbytes for layer in layers for buffer in layer.buffers())
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    assert report.bits_per_weight() == pytest.approx(bits / weights)
    assert f"{bits / weights:.3g} bits a weight" in report.summary()
