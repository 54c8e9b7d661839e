"""CAT-Q behind `from_pretrained`: what is trained, what is kept, and what is refused."""

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F

import hf_ext
from hf_ext import CatQConfig, LowBitLinear
from hf_ext.core.modules import named_linears, weight_of
from hf_ext.ops.packed_weight import dequantize
from hf_ext.quantizers.catq.functional import modulate, ternarize
from hf_ext.quantizers.catq.method import CatQMethod, TernaryStandIn
from tests import tiny
from tests.numerics import assert_matches


TOKENS = torch.randint(3, tiny.VOCAB_SIZE, (8, 24), generator=torch.Generator().manual_seed(5))
UNTRAINED = {"epochs": 0, "lora_rank": 0}
SHORT = {"epochs": 5, "lora_rank": 4, "num_layers": 1, "stride": 1, "fill": 1}


def config(**options):
    return CatQConfig(**{"preset": "fast", "group_size": 16, "dataset": TOKENS, "batch_size": 4, **SHORT, **options})


def logits(model, tokens=TOKENS[:2]):
    with torch.no_grad():
        return model(tokens).logits


def error_after(model, **options):
    quantized = copy.deepcopy(model)
    report = hf_ext.quantize(quantized, config(**options))
    expected = logits(model, TOKENS)
    return ((logits(quantized, TOKENS) - expected).norm() / expected.norm()).item(), report, quantized


def absmean(weight, group_size):
    grouped = weight.unflatten(1, (-1, group_size))
    centred = grouped - grouped.mean(-1, keepdim=True)
    scale = centred.abs().mean(-1, keepdim=True) + 1e-6
    return (scale * torch.clamp(torch.round(centred / scale), -1, 1)).flatten(1)


def test_null_setting_is_centred_absmean_ternarization(tiny_llama):
    expected = {f"model.{name}": absmean(weight_of(linear), 16) for name, linear in named_linears(tiny_llama.model)}
    hf_ext.quantize(tiny_llama, config(**UNTRAINED))
    assert expected
    for name, weight in expected.items():
        assert_matches(tiny_llama.get_submodule(name).dequantize(), weight, "fp32")


def test_training_brings_the_model_nearer_than_absmean_and_every_window_learns(tiny_llama):
    plain, _, _ = error_after(tiny_llama, **UNTRAINED)
    trained, report, _ = error_after(tiny_llama, epochs=25, num_layers=2)
    assert trained < 0.75 * plain
    assert all(curve[-2] < curve[0] for curve in report.curves)


def test_oracle_5_every_factor_gets_a_gradient_in_both_stages(tiny_llama):
    linear = tiny_llama.model.layers[0].mlp.up_proj
    stand_in = TernaryStandIn(linear, config(), torch.Generator().manual_seed(0))
    torch.nn.init.normal_(stand_in.lora_B)
    hidden_states = torch.randn(5, tiny.HIDDEN_SIZE)
    for stage in (3.0, None):
        stand_in.sharpness = stage
        stand_in.zero_grad()
        stand_in(hidden_states).square().mean().backward()
        for name, parameter in stand_in.named_parameters():
            assert parameter.grad.abs().sum() > 0, (name, stage)
    assert linear.weight.grad is None


def test_oracle_6_the_packed_layer_computes_what_the_ternary_weight_does(tiny_llama):
    hf_ext.quantize(tiny_llama, config())
    layer = tiny_llama.model.layers[1].mlp.down_proj
    weight = layer.dequantize()
    scale = layer.weight_scale.repeat_interleave(16, 1)
    assert set((weight / scale).unique().tolist()) == {-1.0, 0.0, 1.0}
    hidden_states = torch.randn(3, 5, weight.shape[1])
    assert_matches(layer(hidden_states), F.linear(hidden_states, weight), "fp32")


def test_oracle_7_the_lora_is_merged_before_the_weight_is_made_ternary(tiny_llama):
    linear = tiny_llama.model.layers[0].mlp.up_proj
    stand_in = TernaryStandIn(linear, config(lora_alpha=2.0), torch.Generator().manual_seed(0))
    without = stand_in.ternary_weight().detach()
    assert_matches(without, absmean(weight_of(linear), 16), "fp32")  # B = 0 is no LoRA
    torch.nn.init.normal_(stand_in.lora_B)
    change = (2.0 / 4) * stand_in.lora_B @ stand_in.lora_A
    assert_matches(stand_in.ternary_weight(), absmean(weight_of(linear) + change, 16), "fp32")
    assert (stand_in.ternary_weight() - (without + change)).abs().max() > 0.1


def test_the_better_of_the_soft_and_the_hard_end_is_kept(tiny_llama):
    """The last entry of a curve is the loss of what was kept: never above that of the soft end alone."""
    _, soft, _ = error_after(tiny_llama, hard_stage="none", epochs=10)
    _, both, _ = error_after(tiny_llama, epochs=10)
    first = slice(0, 1)  # later windows see other inputs
    assert [curve[-1] for curve in both.curves[first]] <= [curve[-1] for curve in soft.curves[first]]
    assert len(both.curves[0]) == 11 and len(soft.curves[0]) == 9


ABLATIONS = {
    "no modulation": {"factor_lr": 0.0},
    "no softening": {"soft_ratio": 0.0},
    "straight through": {"soft_ratio": 0.0, "hard_stage": "straight_through"},
    "no lora": {"lora_rank": 0},
    "mse": {"loss": "mse"},
    "8-bit activations": {"activation_bits": 8},
    "raw scales": {"scale_from_raw": True},
}


@pytest.mark.parametrize("options", ABLATIONS.values(), ids=ABLATIONS.keys())
def test_every_option_changes_what_comes_out(tiny_llama, options):
    _, _, usual = error_after(tiny_llama)
    _, _, other = error_after(tiny_llama, **options)
    assert not torch.equal(logits(usual), logits(other))


def test_without_learning_rates_nothing_moves(tiny_llama):
    _, _, frozen = error_after(tiny_llama, factor_lr=0.0, lora_lr=0.0)
    _, _, plain = error_after(tiny_llama, **UNTRAINED)
    assert_matches(logits(frozen), logits(plain), "exact")


def test_8_bit_activations_are_rounded_a_token_at_a_time_after_a_reload_too(tiny_llama, tmp_path):
    hf_ext.quantize(tiny_llama, config(activation_bits=8))
    tiny_llama.save_pretrained(tmp_path)
    loaded = type(tiny_llama).from_pretrained(tmp_path)
    assert_matches(logits(loaded), logits(tiny_llama), "exact")
    layer = loaded.model.layers[0].mlp.up_proj
    token = torch.linspace(-1, 2, tiny.HIDDEN_SIZE)
    step = 3 / 255
    rounded = torch.round(token / step) * step
    assert_matches(layer(token), F.linear(rounded, layer.dequantize()), "fp32")
    assert_matches(layer(torch.stack([token, 1e3 * token]))[0], layer(token), "fp32")  # tokens do not meet


def test_a_resumed_run_gives_the_same_bytes(tmp_path):
    """Stopped after every window in turn: each rest of the run ends where the whole one does."""
    model = tiny.llama(num_hidden_layers=4)
    options = {"num_layers": 2, "fill": 2, "epochs": 2}
    whole = copy.deepcopy(model)
    report = hf_ext.quantize(whole, config(checkpoint_dir=str(tmp_path / "whole"), **options))
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sum(name.startswith("window") for name in files) == len(report.curves) > 2
    for kept in range(len(report.curves)):
        folder = tmp_path / f"kept{kept}"
        stop_after(copy.deepcopy(model), kept, config(checkpoint_dir=str(folder), **options))
        rest = copy.deepcopy(model)
        resumed = hf_ext.quantize(rest, config(checkpoint_dir=str(folder), **options))
        assert resumed.curves == report.curves
        for name, tensor in whole.state_dict().items():
            assert_matches(rest.state_dict()[name], tensor, "exact")
        shutil.rmtree(folder)


def stop_after(model, windows, options):
    """A run that is interrupted in the window after the first `windows`."""
    fit = CatQMethod.fit

    def interrupted(self, window):
        if window.index == windows:
            raise KeyboardInterrupt
        fit(self, window)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CatQMethod, "fit", interrupted)
        hf_ext.quantize(model, options)


def test_a_stopped_run_leaves_the_float_linears_of_unfinished_blocks(tiny_llama, tmp_path):
    """Stopped in the first window the model is as it was, and a run with better options goes through."""
    before = copy.deepcopy(tiny_llama)
    with pytest.raises(ValueError, match="loss of window 0"):
        hf_ext.quantize(tiny_llama, config(factor_lr=1e30, lora_lr=1e30, epochs=20, max_grad_norm=1e30))
    assert_matches(logits(tiny_llama), logits(before), "exact")
    assert tiny_llama.state_dict().keys() == before.state_dict().keys()
    hf_ext.quantize(tiny_llama, config())
    assert_matches(logits(tiny_llama), logits(quantized(before)), "exact")


def quantized(model):
    hf_ext.quantize(model, config())
    return model


@pytest.mark.parametrize("lost", ["block-00000.safetensors", "window-00001.safetensors"])
def test_a_lost_file_of_a_finished_window_is_computed_again(tiny_llama, tmp_path, lost):
    whole = copy.deepcopy(tiny_llama)
    hf_ext.quantize(whole, config(checkpoint_dir=str(tmp_path), num_layers=2))
    (tmp_path / lost).unlink()
    hf_ext.quantize(tiny_llama, config(checkpoint_dir=str(tmp_path), num_layers=2))
    assert_matches(logits(tiny_llama), logits(whole), "exact")


def test_a_run_leaves_nothing_behind(tiny_llama):
    """The global generator, gradients, what is trainable, the mode, hooks, and stand-ins."""
    tiny_llama.train()
    tiny_llama.model.norm.requires_grad_(False)
    before = {name: (p.clone(), p.requires_grad) for name, p in tiny_llama.named_parameters() if "_proj" not in name}
    state = torch.get_rng_state()
    hf_ext.quantize(tiny_llama, config())
    assert torch.equal(torch.get_rng_state(), state)
    after = dict(tiny_llama.named_parameters())
    assert after.keys() == before.keys() and tiny_llama.training
    for name, (value, trainable) in before.items():
        assert after[name].requires_grad == trainable and after[name].grad is None
        assert_matches(after[name], value, "exact")
    modules = list(tiny_llama.modules())
    assert not any(isinstance(module, TernaryStandIn) or module._forward_pre_hooks for module in modules)


def test_targets_come_from_the_float_weights_even_where_windows_overlap(tiny_llama, monkeypatch):
    """A stand-in that leaked into the teacher would change the targets of the second window."""
    expected = tiny_llama.model.layers[0](
        tiny_llama.model.embed_tokens(TOKENS[:4]), position_embeddings=rotary(tiny_llama)
    )
    seen = {}
    fit = CatQMethod.fit

    def keep_targets(self, window):
        seen[window.index] = window.targets[0].clone()
        fit(self, window)

    monkeypatch.setattr(CatQMethod, "fit", keep_targets)
    hf_ext.quantize(tiny_llama, config(num_layers=1, fill=1))
    assert_matches(seen[0], expected, "fp32")


def rotary(model):
    positions = torch.arange(TOKENS.shape[1])[None]
    return model.model.rotary_emb(model.model.embed_tokens(TOKENS[:4]), positions)


OFFICIAL = {
    "mean_factor": "weight_quantizer.generate_mu_factor.bound_factor",
    "scale_factor": "weight_quantizer.generate_scale_factor.bound_factor",
    "threshold_factor": "weight_quantizer.generate_round_factor.bound_factor",
    "lora_A": "lora_A.0",
    "lora_B": "lora_B.0",
}


def official_state(model):
    """Random parameters in the names and shapes of the released code."""
    generator = torch.Generator().manual_seed(7)
    state = {}
    for name, linear in named_linears(model.model):
        _, index, inner = name.split(".", 2)
        out_features, in_features = linear.weight.shape
        for ours, official in OFFICIAL.items():
            shape = {"lora_A": (4, in_features), "lora_B": (out_features, 4)}.get(ours)
            shape = shape or (out_features * in_features // 16, 1)
            tensor = torch.randn(shape, generator=generator) * 0.3
            state.setdefault(int(index), {})[f"{inner}.{official}"] = tensor
    return state


def official_weight(linear, held, inner):
    """The released fake quantization: flat groups, `clamp(round(x / 2 / threshold))`."""
    weight = weight_of(linear) + held[f"{inner}.lora_B.0"] @ held[f"{inner}.lora_A.0"] / 4
    flat = weight.reshape(-1, 16)
    mean_factor, scale_factor, threshold_factor = (held[f"{inner}.{name}"] for name in list(OFFICIAL.values())[:3])
    mean = flat.mean(-1, keepdim=True)
    scale = (flat - mean).abs().mean(-1, keepdim=True) + 1e-6
    mean = mean + (2 * torch.sigmoid(mean_factor) - 1) * scale
    scale = 2 * torch.sigmoid(scale_factor) * scale
    threshold = 2 * torch.sigmoid(threshold_factor) * 0.5
    codes = torch.clamp(torch.round((flat - mean) / scale * 0.5 / threshold), -1, 1)
    return (codes * scale).view_as(weight), codes.view_as(weight)


@pytest.mark.parametrize("manifest", [False, True])
def test_oracle_9_the_official_parameters_give_the_official_codes(tiny_llama, tmp_path, manifest):
    state = official_state(tiny_llama)
    path = tmp_path / "parameters.pth"
    if manifest:
        for index, tensors in state.items():
            torch.save(tensors, tmp_path / f"layer{index}.pth")
        layers = {index: f"layer{index}.pth" for index in state}
        torch.save({"__format__": "parameters_per_layer_v1", "layers": layers}, path)
    else:
        torch.save(state, path)
    plain = copy.deepcopy(tiny_llama)
    hf_ext.quantize(tiny_llama, CatQConfig(group_size=16, parameters=str(path)))
    for name, linear in named_linears(plain.model):
        _, index, inner = name.split(".", 2)
        weight, codes = official_weight(linear, state[int(index)], inner)
        layer = tiny_llama.model.get_submodule(name)
        assert_matches(torch.sign(layer.dequantize()), codes, "exact")
        assert_matches(layer.dequantize(), weight, "fp32")


def test_official_parameters_that_do_not_fit_are_refused(tiny_llama, tmp_path):
    path, outside = tmp_path / "parameters.pth", tmp_path / "outside.pth"
    state = official_state(tiny_llama)
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"group_size=32 it takes"):
        hf_ext.quantize(copy.deepcopy(tiny_llama), CatQConfig(group_size=32, parameters=str(path)))
    del state[1]["mlp.up_proj.weight_quantizer.generate_mu_factor.bound_factor"]
    refused_whole(tiny_llama, state, path, r"mlp\.up_proj \(layer 1\) is absent")
    state = official_state(tiny_llama)
    state[1]["mlp.up_proj.lora_B.0"] = torch.zeros(3, 4)
    refused_whole(tiny_llama, state, path, r"LoRA of .*mlp\.up_proj \(layer 1\) has shapes")
    del state[1]["mlp.up_proj.lora_B.0"]
    refused_whole(tiny_llama, state, path, r"LoRA of .*mlp\.up_proj \(layer 1\) has shapes")
    refused_whole(tiny_llama, tiny_llama.state_dict(), path, "does not hold the parameters of every layer")
    torch.save(official_state(tiny_llama)[0], outside)
    (tmp_path / "inner").mkdir()
    escaping = tmp_path / "inner" / "parameters.pth"
    torch.save({"__format__": "parameters_per_layer_v1", "layers": {0: "../outside.pth"}}, escaping)
    with pytest.raises(ValueError, match="outside the folder"):
        hf_ext.quantize(copy.deepcopy(tiny_llama), CatQConfig(group_size=16, parameters=str(escaping)))
    path.write_bytes(b"no tensors")
    with pytest.raises(OSError, match="damaged"):
        hf_ext.quantize(copy.deepcopy(tiny_llama), CatQConfig(group_size=16, parameters=str(path)))
    with pytest.raises(OSError, match="no such file"):
        hf_ext.quantize(copy.deepcopy(tiny_llama), CatQConfig(group_size=16, parameters=str(tmp_path / "absent")))


def refused_whole(model, state, path, words):
    """Before the first linear changes."""
    torch.save(state, path)
    changed = copy.deepcopy(model)
    with pytest.raises(ValueError, match=words):
        hf_ext.quantize(changed, CatQConfig(group_size=16, parameters=str(path)))
    assert_matches(logits(changed), logits(model), "exact")


def test_official_parameters_are_part_of_what_a_checkpoint_is_of(tiny_llama, tmp_path):
    state = official_state(tiny_llama)
    for name in ("a", "b"):
        torch.save(state, tmp_path / f"{name}.pth")
        state[0]["mlp.up_proj.lora_B.0"] = state[0]["mlp.up_proj.lora_B.0"] + 1
    options = {"group_size": 16, "checkpoint_dir": str(tmp_path / "run")}
    hf_ext.quantize(copy.deepcopy(tiny_llama), CatQConfig(parameters=str(tmp_path / "a.pth"), **options))
    with pytest.raises(ValueError, match="belongs to another run: parameters="):
        hf_ext.quantize(tiny_llama, CatQConfig(parameters=str(tmp_path / "b.pth"), **options))


REFUSED = {
    "preset": ({"preset": "quick"}, "preset='quick' is unknown"),
    "stride": ({"num_layers": 2, "stride": 3}, "stride=3; allowed is a number from 1 to 2"),
    "epochs": ({"epochs": -1}, "epochs=-1"),
    "activation bits": ({"activation_bits": 4}, "activation_bits=4; allowed are 8, 16"),
    "hard stage": ({"hard_stage": "replay"}, "hard_stage='replay' is unknown"),
    "rate": ({"factor_lr": -0.1}, "factor_lr=-0.1"),
    "huber": ({"huber_delta_max": 0.01}, "huber_delta_max=0.01"),
}


@pytest.mark.parametrize("options, words", REFUSED.values(), ids=REFUSED.keys())
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        config(**options)


def test_options_of_another_method_are_refused():
    with pytest.raises(TypeError, match="CatQConfig has no option 'bits'"):
        config(bits=2)


def test_a_group_size_that_does_not_divide_is_refused_with_those_that_do(tiny_llama):
    before = copy.deepcopy(tiny_llama.state_dict())
    with pytest.raises(ValueError, match=r"group_size=24 does not divide .* \(32 columns\).*: 16, 32, and -1"):
        hf_ext.quantize(tiny_llama, config(group_size=24))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_llama.state_dict().items())


def test_presets_fill_what_is_not_given():
    paper, fast = CatQConfig(), CatQConfig(preset="fast", epochs=3)
    assert (paper.num_samples, paper.sequence_length, paper.epochs, paper.num_layers) == (512, 2048, 60, 4)
    assert fast.epochs == 3 and fast.num_samples < 512
    assert (paper.lora_rank, paper.lora_alpha, paper.stride, paper.fill) == (64, 1.0, 2, 4)
    again = CatQConfig(**{**fast.to_dict(), "preset": "paper"})
    assert again.epochs == 3 and again.stride == fast.stride  # what was stored wins over the preset


def test_a_rate_that_diverges_names_the_window(tiny_llama):
    with pytest.raises(ValueError, match="loss of window 0 is nan in epoch"):
        hf_ext.quantize(tiny_llama, config(factor_lr=1e30, lora_lr=1e30, epochs=20, max_grad_norm=1e30))


def test_experts_have_factors_and_a_lora_of_their_own(tiny_model):
    model = tiny_model("mixtral")
    plain, _, _ = error_after(model, **UNTRAINED)
    trained, report, quantized = error_after(model, epochs=20)
    experts = [layer for layer in report.layers if ".experts." in layer.name]
    assert len(experts) == 2 * 4 * 2 and trained < plain
    assert isinstance(quantized.get_submodule(experts[0].name), LowBitLinear)


def test_experts_without_tokens_are_named(tiny_model):
    model = tiny_model("mixtral")
    with pytest.warns(UserWarning, match="no calibration token reached it: made ternary without training"):
        report = hf_ext.quantize(model, config(dataset=TOKENS[:1, :2], batch_size=1, epochs=1))
    unseen = [layer.name for layer in report.layers if "no calibration token" in layer.note]
    assert unseen and all(".experts." in name for name in unseen)
    assert torch.isfinite(logits(model)).all()


def test_blocks_behind_the_last_target_are_not_walked(tiny_llama):
    report = hf_ext.quantize(tiny_llama, config(modules_to_not_convert=["model.layers.1"]))
    assert len(report.curves) == 1 and report.count("quantized") == 7


def test_a_block_that_reads_a_weight_is_named_before_training(tiny_llama, monkeypatch):
    block = type(tiny_llama.model.layers[0].mlp)
    monkeypatch.setattr(block, "forward", lambda self, x: self.down_proj(x @ self.up_proj.weight.T))
    with pytest.raises(ValueError, match=r"reads a weight directly.*up_proj"):
        hf_ext.quantize(tiny_llama, config())


def test_the_report_plots_the_losses(tiny_llama):
    pytest.importorskip("matplotlib")
    _, report, _ = error_after(tiny_llama)
    axes = report.plot().axes
    assert len(axes[-1].lines) == len(report.curves)
    assert axes[-1].lines[0].get_ydata().tolist() == report.curves[0]


def test_the_hard_codes_of_the_stand_in_are_the_packed_ones(tiny_llama):
    linear = tiny_llama.model.layers[0].self_attn.q_proj
    stand_in = TernaryStandIn(linear, config(lora_alpha=1.0), torch.Generator().manual_seed(0))
    for parameter in stand_in.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert_matches(torch.sign(stand_in.ternary_weight()), torch.sign(dequantize(stand_in.pack())), "exact")
    same = modulate(
        weight_of(linear) + stand_in.lora_B @ stand_in.lora_A / 4,
        stand_in.mean_factor,
        stand_in.scale_factor,
        stand_in.threshold_factor,
        group_size=16,
    )
    codes = ternarize(same.normalized, same.threshold).flatten(1)
    assert_matches(torch.sign(dequantize(stand_in.pack())), codes, "exact")
    stand_in.bypassed = True
    hidden_states = torch.randn(2, tiny.HIDDEN_SIZE)
    assert_matches(stand_in(hidden_states), linear(hidden_states), "exact")
