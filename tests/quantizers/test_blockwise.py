"""The engine shows a method the very inputs of the model, keeps nothing it should not, and can be stopped anywhere."""

import copy
import shutil

import pytest
import torch
from torch import nn

from hf_ext import OSAQConfig
from hf_ext.core.modules import named_linears, set_linear_weight, weight_of
from hf_ext.quantizers.blockwise import LayerResult, quantize_blockwise
from hf_ext.quantizers.plan import plan_quantization, slice_experts
from tests import tiny
from tests.numerics import assert_matches


class Halve:
    """Sees everything, and halves every weight."""

    name = "halve"
    needs_inputs = True
    packed_types = ()

    def __init__(self, propagate_error=False):
        self.propagate_error = propagate_error
        self.seen: dict[str, list[torch.Tensor]] = {}
        self.groups: dict[str, list[str]] = {}

    def observe(self, group, hidden_states):
        self.seen.setdefault(group, []).append(hidden_states.clone())

    def solve(self, group, linears):
        self.groups[group] = list(linears)
        return {name: LayerResult(weight=weight_of(linear) / 2) for name, linear in linears.items()}

    def inputs_of(self, name):
        leader = next(leader for leader, members in self.groups.items() if name in members)
        return torch.cat(self.seen[leader])


def run(model, rows, method, **options):
    plan = plan_quantization(model, OSAQConfig())
    slice_experts(model, plan)
    return quantize_blockwise(model, rows, method, plan.targets, lambda name, result: None, **options)


def true_inputs(model, rows):
    """The inputs of every linear when the model runs on each row alone, in the engine's order of rows."""
    seen = {}
    handles = [
        linear.register_forward_pre_hook(
            lambda module, args, name=name: seen.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]))
        )
        for name, linear in named_linears(model)
    ]
    with torch.no_grad():
        for row in sorted(rows, key=len, reverse=True):
            model(row[None])
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def rows_of_lengths(*lengths):
    return [torch.randint(3, tiny.VOCAB_SIZE, (length,)) for length in lengths]


@pytest.mark.parametrize("family", tiny.MODELS)
def test_a_method_sees_the_inputs_of_the_float_model(tiny_model, family):
    """Rows of several lengths and batches of several rows: padding would show as inputs no row alone has."""
    model = tiny_model(family)
    rows = rows_of_lengths(12, 12, 12, 7, 5)
    method = Halve()
    sliced = copy.deepcopy(model)
    slice_experts(sliced, plan_quantization(sliced, OSAQConfig()))
    expected = true_inputs(sliced, rows)
    report = run(model, rows, method, batch_size=2)
    for layer in report.layers:
        seen, wanted = method.inputs_of(layer.name), expected[layer.name]
        assert seen.shape == wanted.shape, layer.name
        # Experts get their tokens ordered by batch; the second moment does not depend on the order.
        assert_matches(seen.T @ seen, wanted.T @ wanted, "fp32")


def test_later_blocks_see_changed_outputs_only_if_the_method_says_so(tiny_llama):
    rows = rows_of_lengths(10, 10)
    halved = copy.deepcopy(tiny_llama)
    for _, linear in named_linears(halved.model.layers[0]):
        set_linear_weight(linear, weight_of(linear) / 2)
    name = "model.layers.1.self_attn.q_proj"
    for propagate_error, source in ((False, tiny_llama), (True, halved)):
        method = Halve(propagate_error)
        expected = true_inputs(source, rows)[name]
        run(copy.deepcopy(tiny_llama), rows, method)
        assert_matches(method.inputs_of(name), expected, "fp32")


def test_linears_with_one_input_are_one_group(tiny_llama):
    method = Halve()
    run(tiny_llama, rows_of_lengths(6), method)
    prefix = "model.layers.0."
    shared = {tuple(name.removeprefix(prefix) for name in members) for members in method.groups.values()}
    assert ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") in shared
    assert ("mlp.gate_proj", "mlp.up_proj") in shared
    assert ("mlp.down_proj",) in shared


def test_the_model_comes_back_in_its_mode_and_without_hooks(tiny_llama):
    tiny_llama.train()
    run(tiny_llama, rows_of_lengths(6), Halve())
    assert tiny_llama.training
    assert not any(module._forward_pre_hooks for module in tiny_llama.modules())


def test_offloaded_activations_change_nothing(tiny_llama, tmp_path):
    rows = rows_of_lengths(9, 9, 4)
    methods = [Halve(propagate_error=True), Halve(propagate_error=True)]
    for method, folder in zip(methods, (None, str(tmp_path / "offload")), strict=True):
        run(copy.deepcopy(tiny_llama), rows, method, offload_dir=folder)
    for group, seen in methods[0].seen.items():
        assert_matches(torch.cat(methods[1].seen[group]), torch.cat(seen), "exact")
    assert list((tmp_path / "offload").iterdir()) == []


class Overflow(nn.Module):
    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states * float("inf")


def test_non_finite_activations_name_the_layer(tiny_llama):
    tiny_llama.model.layers[0].mlp.act_fn = Overflow()
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.down_proj hold NaN or infinite"):
        run(tiny_llama, rows_of_lengths(6), Halve())


class Interrupted(Halve):
    def __init__(self, at):
        super().__init__(propagate_error=True)
        self.at = at

    def solve(self, group, linears):
        if group == self.at:
            raise KeyboardInterrupt
        return super().solve(group, linears)


def test_ctrl_c_leaves_no_hooks_and_no_files(tiny_llama, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(
            tiny_llama,
            rows_of_lengths(6),
            Interrupted("model.layers.1.mlp.down_proj"),
            offload_dir=str(tmp_path / "o"),
        )
    assert not any(module._forward_pre_hooks for module in tiny_llama.modules())
    assert list((tmp_path / "o").iterdir()) == []
    shutil.rmtree(tmp_path / "o")


def test_a_block_with_data_dependent_arguments_is_refused(tiny_llama):
    """Replaying a block needs its arguments to depend on the shape alone; here one carries the embeddings."""

    class Sneaky(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, hidden_states, extra=None, **kwargs):
            return self.block(hidden_states, **kwargs)

    first = tiny_llama.model.layers[0]
    tiny_llama.model.layers[0] = Sneaky(first)
    handle = tiny_llama.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "extra": args[0] * 2}), with_kwargs=True, prepend=True
    )
    with pytest.raises(ValueError, match="'extra', which depends on the tokens"):
        run(tiny_llama, rows_of_lengths(6), Halve())
    handle.remove()
