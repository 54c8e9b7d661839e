"""Distillation: the loss the Trainer takes, accumulation, evaluation, resuming, and what comes out."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import hf_ext
from hf_ext.quantizers.littlebit2 import LittleBit2Config, pack
from hf_ext.quantizers.littlebit2.layer import FactoredBinaryLinear, LatentBinaryLinear
from hf_ext.quantizers.littlebit2.trainer import LittleBit2Trainer
from tests import tiny
from tests.numerics import assert_matches


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is an initialisation"),
    pytest.mark.filterwarnings("ignore:LittleBit-2. the smallest rank"),
]

LENGTH = 12
TOKENS = torch.randint(3, tiny.VOCAB_SIZE, (80, LENGTH), generator=torch.Generator().manual_seed(0))
ROWS, HELD_OUT = ([{"input_ids": row} for row in tokens] for tokens in TOKENS.split([64, 16]))


def padded(rows):
    """The rows with 0 to 5 of their first tokens padding, on the left."""
    result = []
    for number, row in enumerate(rows):
        mask = (torch.arange(LENGTH) >= number % 6).long()
        result.append({"input_ids": row["input_ids"] * mask, "attention_mask": mask})
    return result


def student(model, **options):
    hf_ext.quantize(model, LittleBit2Config(**{"bits": 1.0, "trainable": True, **options}))
    return model


def trainer(model, teacher, folder, rows=ROWS, hidden_loss_weight=10.0, **options):
    options = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "learning_rate": 5e-3,
        "max_steps": 6,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    return LittleBit2Trainer(
        model,
        teacher_model=teacher,
        hidden_loss_weight=hidden_loss_weight,
        args=TrainingArguments(str(folder), **options),
        train_dataset=rows,
        eval_dataset=HELD_OUT,
    )


def losses(done):
    return [entry["loss"] for entry in done.state.log_history if "loss" in entry]


def official_loss(model, teacher, rows):
    """The authors' loss of one batch without padding, from the outputs that Transformers gives."""
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    with torch.no_grad():
        own, other = (m(**batch, output_hidden_states=True) for m in (model, teacher))
    loss = F.kl_div(own.logits.log_softmax(-1), other.logits.softmax(-1), reduction="batchmean")
    pairs = list(zip(own.hidden_states[1:], other.hidden_states[1:], strict=True))
    assert len(pairs) == model.config.num_hidden_layers
    return loss + 10 * sum(F.mse_loss(*pair) for pair in pairs)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_loss_is_the_official_one(tiny_model, tmp_path, family):
    teacher, model = tiny_model(family), student(tiny_model(family)).eval()
    found = trainer(model, teacher, tmp_path).evaluate()["eval_loss"]
    expected = official_loss(model, teacher, HELD_OUT)
    assert_matches(torch.tensor(found), expected, "fp32")


@pytest.mark.parametrize("rows", [ROWS, padded(ROWS)], ids=["whole", "padded"])
def test_accumulated_batches_are_one_batch(tiny_model, tmp_path, rows):
    trained = []
    for size, steps in ((8, 1), (2, 4)):
        done = trainer(
            student(tiny_model("llama")),
            tiny_model("llama"),
            tmp_path,
            rows,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            max_steps=2,
            optim="sgd",
            learning_rate=1e-4,
        )
        done.train()
        trained.append(done)
    assert_matches(torch.tensor(losses(trained[1])), torch.tensor(losses(trained[0])), "fp32")
    start = student(tiny_model("llama")).state_dict()
    for name, tensor in trained[0].model.state_dict().items():
        step = tensor - start[name]
        assert step.any() == ("lm_head" not in name and "embed_tokens" not in name), name
        assert (trained[1].model.state_dict()[name] - tensor).norm() <= 1e-3 * step.norm(), name


def test_training_lowers_the_divergence_on_text_not_seen(tiny_model, tmp_path):
    teacher, model = tiny_model("llama"), student(tiny_model("llama"))
    before, frozen = copy.deepcopy(model.state_dict()), ("model.embed_tokens.weight", "lm_head.weight")
    done = trainer(model, teacher, tmp_path, max_steps=20, lr_scheduler_type="cosine")

    def held_out_divergence():
        done.hidden_loss_weight = 0
        found = done.evaluate()["eval_loss"]
        done.hidden_loss_weight = 10.0
        return found

    start = held_out_divergence()
    done.train()
    assert held_out_divergence() < 0.9 * start
    assert losses(done)[-1] < 0.85 * losses(done)[0]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name in frozen), name


@pytest.mark.parametrize("sign_gradient", ["smoothsign", "ste"])
def test_resuming_continues_the_curve(tiny_model, tmp_path, sign_gradient):
    teacher, options = tiny_model("llama"), {"lr_scheduler_type": "cosine", "save_strategy": "steps", "save_steps": 3}
    whole = trainer(student(tiny_model("llama"), sign_gradient=sign_gradient), teacher, tmp_path / "whole", **options)
    whole.train()
    # From what the checkpoint folder holds alone, as after a crash.
    folder = tmp_path / "whole" / "checkpoint-3"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(isinstance(module, LatentBinaryLinear) for module in model.modules()) == 14
    resumed = trainer(model, teacher, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(folder))
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 6
    for name, tensor in whole.model.state_dict().items():
        assert_matches(resumed.model.state_dict()[name], tensor, "exact")


def test_gradient_checkpointing_gives_the_same_gradients(tiny_model):
    grads = []
    for checkpointing in (False, True):
        model = student(tiny_model("llama")).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        done = trainer(model, tiny_model("llama"), "unused")
        batch = {"input_ids": TOKENS[:4]}
        done.compute_loss(model, batch).backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) == 14 * 6 + 5
    for name, grad in grads[0].items():
        assert_matches(grads[1][name], grad, "fp32")


def test_evaluation_needs_no_labels_and_ignores_them(tiny_model, tmp_path):
    teacher, model = tiny_model("llama"), student(tiny_model("llama"))
    done = trainer(model, teacher, tmp_path)
    labelled = [{**row, "labels": row["input_ids"]} for row in HELD_OUT]
    expected = done.evaluate()["eval_loss"]
    assert done.evaluate(labelled)["eval_loss"] == expected
    done.compute_metrics = lambda found: {"agreement": (found.predictions.argmax(-1) == found.label_ids).mean()}
    metrics = done.evaluate(labelled)
    assert metrics["eval_loss"] == expected and 0 <= metrics["eval_agreement"] <= 1


def test_mixed_precision_trains_float32_factors(tiny_model, tmp_path):
    model = student(tiny_model("llama"))
    done = trainer(model, tiny_model("llama"), tmp_path, bf16=True, max_steps=3)
    done.train()
    assert all(torch.isfinite(torch.tensor(losses(done))))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    layer = model.model.layers[0].mlp.up_proj
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, tiny.HIDDEN_SIZE)).dtype == torch.bfloat16


def test_a_trained_model_packs_saves_and_reloads(tiny_model, tmp_path):
    model = student(tiny_model("llama"))
    trainer(model, tiny_model("llama"), tmp_path / "out").train()
    model.eval()
    dense = {name: m.dequantize() for name, m in model.named_modules() if isinstance(m, LatentBinaryLinear)}
    pack(model)
    for name, weight in dense.items():
        assert_matches(model.get_submodule(name).dequantize(), weight, "lowp")
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert sum(isinstance(m, FactoredBinaryLinear) for m in again.modules()) == len(dense)
    with torch.no_grad():
        assert_matches(again(TOKENS[:2]).logits, model(TOKENS[:2]).logits, "exact")


def test_a_packed_model_trains_no_further(tiny_model, tmp_path):
    packed = tiny_model("llama")
    hf_ext.quantize(packed, LittleBit2Config(bits=1.0))
    with pytest.raises(ValueError, match=r"no trainable LittleBit-2 layers: .*trainable=True"):
        trainer(packed, tiny_model("llama"), tmp_path)
    with pytest.raises(ValueError, match="attach trainable adapters"):
        Trainer(packed, args=TrainingArguments(str(tmp_path), report_to=[], use_cpu=True), train_dataset=ROWS)


def test_a_teacher_of_another_shape_is_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="teacher_model has num_hidden_layers=3, but the model has 2"):
        trainer(student(tiny_model("llama")), tiny.llama(num_hidden_layers=3), tmp_path)


def test_the_teacher_is_frozen_and_not_changed(tiny_model, tmp_path):
    teacher = tiny_model("llama").train()
    before = copy.deepcopy(teacher.state_dict())
    trainer(student(tiny_model("llama")), teacher, tmp_path, max_steps=1).train()
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    for name, tensor in teacher.state_dict().items():
        assert_matches(tensor, before[name], "exact")


def test_biases_and_norms_train(tiny_model, tmp_path):
    model = student(tiny_model("opt"))
    before = copy.deepcopy(model.state_dict())
    trainer(model, tiny_model("opt"), tmp_path, max_steps=1).train()
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert any(name.endswith("fc1.bias") for name in moved) and any("layer_norm.weight" in name for name in moved)
    assert not any("embed" in name or "lm_head" in name for name in moved)
    assert all(isinstance(model.get_submodule(n.rpartition(".")[0]), nn.Module) for n in moved)


TWO_PROCESSES = """
import json, sys
import hf_ext
from tests import tiny
from tests.quantizers.littlebit2.test_trainer import losses, student, trainer

done = trainer(student(tiny.llama()), tiny.llama(), sys.argv[1], optim="sgd", learning_rate=1e-4, max_steps=3,
               per_device_train_batch_size=64 // int(sys.argv[2]))
done.train()
if done.is_world_process_zero():
    print(json.dumps([losses(done), done.evaluate()["eval_loss"]]))
else:
    done.evaluate()
"""


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TWO_PROCESSES)
    found = []
    for processes in (1, 2):
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        done = subprocess.run(
            [sys.executable, *launch, str(script), str(tmp_path / "out"), str(processes)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        steps, evaluation = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
        found.append(torch.tensor([*steps, evaluation]))
    assert_matches(found[1], found[0], "fp32")


def test_rows_of_unequal_length_are_padded_without_a_collator(tiny_llama, tmp_path):
    """The loss of a batch is the mean of its rows', whatever the padding."""
    teacher = copy.deepcopy(tiny_llama)
    rows = [{"input_ids": row[:length].tolist()} for row, length in zip(TOKENS, (5, 12, 8, 3), strict=False)]
    it = trainer(student(tiny_llama), teacher, tmp_path, rows=rows)
    alone = [it.evaluate(eval_dataset=[row])["eval_loss"] for row in rows]
    assert it.evaluate(eval_dataset=rows)["eval_loss"] == pytest.approx(sum(alone) / 4, rel=1e-5)


def test_checkpoints_say_that_their_model_is_trained(tiny_llama, tmp_path):
    teacher = copy.deepcopy(tiny_llama)
    it = trainer(student(tiny_llama), teacher, tmp_path, max_steps=1)
    assert not it.model.config.quantization_config.trained
    it.train()
    it.save_model(tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert stored["trained"] and stored["trainable"]
    assert pack(it.model).config.quantization_config.trained
