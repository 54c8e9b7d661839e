"""LoRA on low-bit linears: dispatch, training, saving, merging; peers 24 to 28."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import hf_ext
from hf_ext import LowBitLinear, OSAQConfig
from hf_ext.quantizers.peft import LowBitLoraLinear
from tests import tiny
from tests.fresh_process import FreshProcesses
from tests.numerics import assert_matches


TOKENS = torch.randint(3, tiny.VOCAB_SIZE, (8, 16), generator=torch.Generator().manual_seed(5))
TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"], "opt": ["q_proj", "fc2"]}


def quantized(model):
    hf_ext.quantize(model, OSAQConfig(bits=4, group_size=16, dataset=TOKENS))
    return model


def with_adapter(model, targets, **options):
    torch.manual_seed(3)
    peft_model = get_peft_model(
        model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    )
    return peft_model.eval()


def logits(model):
    with torch.no_grad():
        return model(TOKENS[:2]).logits


@pytest.mark.parametrize("family", TARGETS)
def test_an_adapter_adds_its_product(tiny_model, family):
    """The output must be that of the same adapter on the dequantized model, and of the base while disabled."""
    base = quantized(tiny_model(family))
    plain = copy.deepcopy(base).dequantize()
    expected_base = logits(base)
    adapted = with_adapter(base, TARGETS[family])
    found = [module for module in adapted.modules() if isinstance(module, LowBitLoraLinear)]
    assert len(found) >= 4
    reference = with_adapter(plain, TARGETS[family])
    reference.load_state_dict(
        {name: tensor for name, tensor in adapted.state_dict().items() if "lora_" in name}, strict=False
    )
    assert_matches(logits(adapted), logits(reference), "model")
    assert not torch.equal(logits(adapted), expected_base)
    with adapted.disable_adapter():
        assert_matches(logits(adapted), expected_base, "exact")


def test_one_trainer_step_changes_only_the_adapter(tiny_llama, tmp_path):
    model = with_adapter(quantized(tiny_llama), TARGETS["llama"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        gradient_checkpointing=True,
    )
    result = Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert result.training_loss == result.training_loss
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) != ("lora_" in name), name


def test_the_gradient_is_that_of_the_dequantized_model(tiny_llama):
    base = quantized(tiny_llama)
    plain = copy.deepcopy(base).dequantize()
    gradients = []
    for model in (with_adapter(base, TARGETS["llama"]), with_adapter(plain, TARGETS["llama"])):
        model(TOKENS[:2], labels=TOKENS[:2]).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, gradient in gradients[0].items():
        assert_matches(gradient, gradients[1][name], "model")


def test_merging_into_packed_weights_is_refused_with_a_way_out(tiny_llama):
    """The way out in the message must work: dequantize, then merge, gives a plain float model."""
    model = with_adapter(quantized(tiny_llama), TARGETS["llama"])
    expected = logits(model)
    with pytest.raises(ValueError, match=r"get_base_model\(\)\.dequantize\(\) first"):
        copy.deepcopy(model).merge_and_unload()
    model.get_base_model().dequantize()
    merged = model.merge_and_unload()
    assert not any(isinstance(module, (LowBitLinear, LowBitLoraLinear)) for module in merged.modules())
    assert type(merged.model.layers[0].self_attn.q_proj) is nn.Linear
    assert not hasattr(merged.config, "quantization_config")
    assert_matches(logits(merged), expected, "model")


def test_merge_and_unmerge_on_a_float_base(tiny_model):
    for family in ("llama", "gpt2"):
        model = with_adapter(quantized(tiny_model(family)), TARGETS[family])
        model.get_base_model().dequantize()
        expected = logits(model)
        model.merge_adapter()
        assert_matches(logits(model), expected, "model")
        model.unmerge_adapter()
        assert_matches(logits(model), expected, "model")


LOAD = """
import torch
import hf_ext
from peft import PeftModel
from transformers import AutoModelForCausalLM
from safetensors.torch import load_file
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}), {adapter!r})
given = load_file({expected!r})
with torch.no_grad():
    assert torch.equal(model(given["tokens"]).logits, given["logits"])
"""


def test_a_saved_adapter_loads_in_a_fresh_process(tiny_llama, tmp_path):
    """peers 27: PEFT does not store custom mappings, so `import hf_ext` must be enough."""
    base = quantized(tiny_llama)
    base.save_pretrained(tmp_path / "base")
    model = with_adapter(base, TARGETS["llama"])
    model.save_pretrained(tmp_path / "adapter")
    save_file({"tokens": TOKENS[:2].contiguous(), "logits": logits(model)}, tmp_path / "expected.safetensors")
    files = {"base": "base", "adapter": "adapter", "expected": "expected.safetensors"}
    with FreshProcesses("torch._dynamo") as fresh:
        fresh.run(LOAD.format(**{key: str(tmp_path / name) for key, name in files.items()}))


def test_adapters_on_experts_attention(tiny_model):
    model = with_adapter(quantized(tiny_model("mixtral")), ["q_proj", "gate_up"])
    names = [name for name, module in model.named_modules() if isinstance(module, LowBitLoraLinear)]
    assert sum(name.endswith("gate_up") for name in names) == 8 and sum(name.endswith("q_proj") for name in names) == 2
    model(TOKENS[:2], labels=TOKENS[:2]).loss.backward()


def test_all_linear_means_low_bit_linears_too(tiny_llama):
    names = {name for name, module in quantized(tiny_llama).named_modules() if isinstance(module, LowBitLinear)}
    model = with_adapter(tiny_llama, "all-linear")
    adapted = {
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if isinstance(module, LowBitLoraLinear)
    }
    assert adapted == names and len(names) == 14
    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert all(len(m.lora_A) == 2 for m in model.modules() if isinstance(m, LowBitLoraLinear))


@pytest.mark.parametrize("options, words", [
    ({"use_dora": True}, "use_dora=True is not supported"),
    ({"lora_bias": True}, "lora_bias=True is not supported"),
])  # fmt: skip
def test_what_the_adapter_cannot_do_is_refused(tiny_llama, options, words):
    with pytest.raises(ValueError, match=words):
        with_adapter(quantized(tiny_llama), ["q_proj"], **options)


def test_initialisations_that_read_the_weight_are_refused(tiny_llama):
    with pytest.raises(ValueError, match="init_lora_weights='pissa'"):
        get_peft_model(quantized(tiny_llama), LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"))


def test_two_adapters_and_switching(tiny_llama):
    model = with_adapter(quantized(tiny_llama), ["q_proj"])
    first = logits(model)
    torch.manual_seed(9)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("second")
    assert not torch.equal(logits(model), first)
    model.set_adapter("default")
    assert_matches(logits(model), first, "exact")


def test_peft_model_of_a_reloaded_base(tiny_llama, tmp_path):
    base = quantized(tiny_llama)
    base.save_pretrained(tmp_path / "base")
    model = with_adapter(base, TARGETS["llama"])
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert_matches(logits(again), logits(model), "exact")
