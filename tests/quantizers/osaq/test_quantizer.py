"""OSAQ behind its two doors: `from_pretrained` and `absorb_outliers`."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

import hf_ext
from hf_ext import LowBitLinear, OSAQConfig
from hf_ext.core.modules import named_linears, weight_of
from hf_ext.ops.low_bit_linear import dequantize
from hf_ext.quantizers.osaq.method import OSAQMethod
from hf_ext.quantizers.rounding import gptq, min_max_grid, round_to_grid
from hf_ext.quantizers.statistics import SecondMoment
from tests import tiny
from tests.numerics import assert_matches


TOKENS = torch.randint(3, tiny.VOCAB_SIZE, (8, 24), generator=torch.Generator().manual_seed(5))
OFF = {"max_null_ratio": 0.0}


def config(**options):
    return OSAQConfig(**{"bits": 3, "group_size": 16, "dataset": TOKENS, **options})


def logits(model):
    with torch.no_grad():
        return model(TOKENS[:2]).logits


@pytest.mark.parametrize("family", tiny.MODELS)
def test_null_setting_leaves_the_model_as_it_is(tiny_model, family):
    """No null direction allowed: `absorb_outliers` changes no bit of any weight, and no name."""
    model = tiny_model(family)
    before = copy.deepcopy(model.state_dict())
    report = hf_ext.absorb_outliers(model, config(**OFF))
    assert model.state_dict().keys() == before.keys()
    for name, tensor in model.state_dict().items():
        assert_matches(tensor, before[name], "exact")
    assert report.count("absorbed") > 0 and report.count("quantized") == 0


def test_null_setting_with_rtn_is_plain_rounding(tiny_llama):
    expected = {}
    for name, linear in named_linears(tiny_llama.model):
        weight = weight_of(linear)
        scale, zero = min_max_grid(weight, 3, 16)
        codes = round_to_grid(weight, scale, zero, 3, 16)
        expected[f"model.{name}"] = (codes - zero.repeat_interleave(16, 1).float()) * scale.repeat_interleave(16, 1)
    hf_ext.quantize(tiny_llama, config(rounding="rtn", **OFF))
    for name, weight in expected.items():
        assert_matches(tiny_llama.get_submodule(name).dequantize(), weight, "fp32")


def test_null_setting_with_gptq_is_plain_gptq(tiny_llama):
    """On the first layer, whose inputs no earlier rounding touches."""
    plain = copy.deepcopy(tiny_llama)
    inputs = []
    handle = plain.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    logits_of_all = plain(TOKENS).logits
    handle.remove()
    tokens = inputs[0].reshape(-1, tiny.HIDDEN_SIZE)
    assert logits_of_all.shape[0] == len(TOKENS)
    moment = SecondMoment(tiny.HIDDEN_SIZE, torch.device("cpu"))
    moment.update(tokens.detach())
    expected = gptq(weight_of(plain.model.layers[0].self_attn.q_proj), moment.mean(), 3, 16)
    hf_ext.quantize(tiny_llama, config(token_normalize=False, **OFF))
    layer = tiny_llama.model.layers[0].self_attn.q_proj
    assert_matches(layer.weight_zero, expected.zero, "exact")
    assert_matches(layer.weight_scale, expected.scale, "fp32")


def test_oracle_01_exact_null_space_keeps_the_logits(tiny_llama):
    """Inputs that leave directions unused: the weights move, the logits do not."""
    embedding = tiny_llama.get_input_embeddings().weight
    with torch.no_grad():
        # Rank 5 of 32 behind the embeddings; the norm's weights of 1 keep it for the first block's q, k and v.
        embedding.copy_(torch.randn(embedding.shape[0], 5) @ torch.randn(5, tiny.HIDDEN_SIZE))
    names = [f"model.layers.0.self_attn.{kind}_proj" for kind in "qkv"]
    before = {name: weight_of(tiny_llama.get_submodule(name)).clone() for name in names}
    expected = logits(tiny_llama)
    others = [name for name, _ in named_linears(tiny_llama) if name not in names and name != "lm_head"]
    report = hf_ext.absorb_outliers(
        tiny_llama, config(gamma=1e-5, mu1=1e-3, max_null_ratio=0.9, modules_to_not_convert=[f"{n}$" for n in others])
    )
    ranks = {layer.name: layer.metrics["null_rank"] for layer in report.layers if layer.status == "absorbed"}
    assert ranks == dict.fromkeys(names, 27.0)
    for name in names:
        assert (weight_of(tiny_llama.get_submodule(name)) - before[name]).norm() > 0.01 * before[name].norm()
    assert_matches(logits(tiny_llama), expected, "model")


def test_oracle_11_shared_inputs_give_what_separate_ones_give(tiny_llama):
    """q, k and v solved as one group, and each alone with its own statistics, agree."""
    tokens = torch.randn(300, tiny.HIDDEN_SIZE)
    linears = {kind: tiny_llama.model.layers[0].self_attn.get_submodule(f"{kind}_proj") for kind in "qkv"}
    together, alone = (OSAQMethod(config(), packs=True) for _ in range(2))
    together.observe("q", tokens)
    results = together.solve("q", linears)
    for kind, linear in linears.items():
        alone.observe(kind, tokens)
        separate = alone.solve(kind, {kind: linear})[kind]
        assert_matches(dequantize(results[kind].packed), dequantize(separate.packed), "exact")
        assert results[kind].metrics == separate.metrics


def test_token_normalize_gives_every_token_the_same_weight():
    """One token a thousand times longer than the others leaves the moment of their directions as it is."""
    tokens = torch.randn(50, 8)
    scaled = tokens.clone()
    scaled[7] *= 1000
    moments = [SecondMoment(8, torch.device("cpu"), token_normalize=True) for _ in range(2)]
    for moment, given in zip(moments, (tokens, scaled), strict=True):
        moment.update(given)
    assert_matches(moments[1].mean(), moments[0].mean(), "fp32")
    assert_matches(moments[0].mean().trace(), torch.tensor(1.0), "fp32")


def test_huge_activations_do_not_overflow_the_statistics():
    moment = SecondMoment(8, torch.device("cpu"), token_normalize=True)
    moment.update(torch.randn(50, 8) * 1e30)
    assert_matches(moment.mean().trace(), torch.tensor(1.0), "fp32")


def test_statistics_are_forgotten_once_used():
    method = OSAQMethod(config(), packs=False)
    method.observe("q", torch.randn(40, 32))
    method.solve("q", {"q": torch.nn.Linear(32, 8)})
    assert method._moments == {}


def test_absorption_helps_row_wise_rounding_where_outliers_meet_unused_directions():
    """The claim, at layer size: inputs near a subspace, a few weights eight times too large, 3 bits a row."""
    generator = torch.Generator().manual_seed(0)
    low_rank = torch.randn(2000, 16, generator=generator) @ torch.randn(16, 64, generator=generator)
    tokens = low_rank + 0.05 * torch.randn(2000, 64, generator=generator)
    linear = torch.nn.Linear(64, 96, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(96, 64, generator=generator) * 0.02)
        linear.weight[torch.rand(96, 64, generator=generator) < 0.005] *= 8
    errors = []
    for options in ({}, OFF):
        method = OSAQMethod(config(group_size=-1, rounding="rtn", **options), packs=True)
        method.observe("layer", tokens)
        errors.append(method.solve("layer", {"layer": linear})["layer"].metrics["output_error"])
    assert errors[0] < 0.75 * errors[1]


def test_absorbed_model_is_plain_and_any_quantizer_takes_it(tiny_llama, tmp_path):
    torchao = pytest.importorskip("torchao.quantization", reason="the `bench` extra brings torchao")
    report = hf_ext.absorb_outliers(tiny_llama, config())
    assert all(layer.metrics["range_ratio"] > 0 for layer in report.layers if layer.status == "absorbed")
    assert not hasattr(tiny_llama.config, "quantization_config")
    assert not any(isinstance(module, LowBitLinear) for module in tiny_llama.modules())
    tiny_llama.save_pretrained(tmp_path)
    quantized = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig())
    )
    assert (logits(quantized) - logits(tiny_llama)).norm() < 0.1 * logits(tiny_llama).norm()


def test_absorb_resumes(tiny_llama, tiny_model, tmp_path):
    hf_ext.absorb_outliers(tiny_llama, config(checkpoint_dir=str(tmp_path)))
    again = tiny_model("llama")
    (tmp_path / "block-00001.safetensors").unlink()
    hf_ext.absorb_outliers(again, config(checkpoint_dir=str(tmp_path)))
    for name, tensor in tiny_llama.state_dict().items():
        assert_matches(again.state_dict()[name], tensor, "exact")


def test_absorbing_a_quantized_model_is_refused(tiny_llama):
    hf_ext.quantize(tiny_llama, config())
    with pytest.raises(ValueError, match="already quantized"):
        hf_ext.absorb_outliers(tiny_llama, config())


@pytest.mark.parametrize(
    "options", [{"desc_act": True}, {"refine_sweeps": 5}, {"rounding": "rtn"}, {"scope": "group"}]
)
def test_options_change_the_codes_and_keep_the_contract(tiny_model, tmp_path, options):
    default, changed = tiny_model("llama"), tiny_model("llama")
    hf_ext.quantize(default, config())
    hf_ext.quantize(changed, config(**options))
    names = [name for name, module in changed.named_modules() if isinstance(module, LowBitLinear)]
    assert any(
        not torch.equal(default.get_submodule(n).weight_packed, changed.get_submodule(n).weight_packed) for n in names
    )
    changed.save_pretrained(tmp_path)
    assert_matches(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(changed), "exact")


def test_refinement_never_raises_the_layer_error(tiny_llama):
    tokens = torch.randn(300, tiny.HIDDEN_SIZE) @ torch.randn(tiny.HIDDEN_SIZE, tiny.HIDDEN_SIZE)
    linear = tiny_llama.model.layers[0].mlp.up_proj
    errors = []
    for sweeps in (0, 1, 5):
        method = OSAQMethod(config(bits=2, refine_sweeps=sweeps, **OFF), packs=True)
        method.observe("up", tokens)
        errors.append(method.solve("up", {"up": linear})["up"].metrics["output_error"])
    assert errors[2] <= errors[1] <= errors[0] and errors[2] < errors[0]


def test_an_all_zero_weight_stays_zero(tiny_llama):
    with torch.no_grad():
        tiny_llama.model.layers[0].mlp.down_proj.weight.zero_()
        tiny_llama.model.layers[1].mlp.gate_proj.weight[3].zero_()
    hf_ext.quantize(tiny_llama, config())
    assert not tiny_llama.model.layers[0].mlp.down_proj.dequantize().any()
    assert not tiny_llama.model.layers[1].mlp.gate_proj.dequantize()[3].any()
    assert torch.isfinite(logits(tiny_llama)).all()


def test_the_report_prints_saves_and_plots(tiny_llama, tmp_path):
    report = hf_ext.quantize(tiny_llama, config())
    text = str(report)
    assert "14 linears quantized, 1 skipped, 192 calibration tokens" in text
    assert "model.layers.1.mlp.down_proj" in text and "outside the decoder blocks" in text
    report.save(tmp_path / "report.json")
    assert (tmp_path / "report.json").stat().st_size > 500
    figure = report.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["null rank", "range ratio", "drift", "output error"]
    figure.savefig(tmp_path / "report.png")
