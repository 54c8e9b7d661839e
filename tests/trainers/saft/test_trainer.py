"""SAFT in real runs of the trainer, beside TRL's own."""

import copy
import inspect
from functools import partial

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer, TrlParser

from hf_ext import SAFTConfig, SAFTTrainer, saft_loss
from hf_ext.trainers.saft.functional import SCHEMES
from tests import tiny
from tests.numerics import assert_matches
from tests.trainers import runs


WEIGHTED = ("harmonic", "geometric", "linear")
saft = partial(runs.make, trainer_class=SAFTTrainer, config_class=SAFTConfig)
GENERATION_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' </s> ' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + ' </s> ' }}{% endif %}{% endfor %}"
)


def weights_after(trainer) -> torch.Tensor:
    trainer.train()
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def first_batch(trainer) -> dict[str, torch.Tensor]:
    return next(iter(trainer.get_train_dataloader()))


@pytest.mark.parametrize("scheme", WEIGHTED)
def test_oracle_1_both_ends_are_trl_s_own_losses(scheme, tiny_llama, tmp_path):
    ends = {}
    for gamma, loss_type in ((0.0, "nll"), (1.0, "dft")):
        ours = saft(tmp_path, copy.deepcopy(tiny_llama), saft_scheme=scheme, saft_gamma=gamma)
        theirs = runs.make(tmp_path, copy.deepcopy(tiny_llama), loss_type=loss_type)
        ends[gamma] = weights_after(theirs)
        assert (weights_after(ours) - ends[gamma]).abs().max() <= 3e-8
        assert runs.curve(ours) == pytest.approx(runs.curve(theirs), rel=1e-6)
    between = weights_after(saft(tmp_path, copy.deepcopy(tiny_llama), saft_scheme=scheme))
    assert all((between - end).abs().max() > 1e-4 for end in ends.values())


@pytest.mark.parametrize("scheme", [it for it in SCHEMES if it != "asft"])
@pytest.mark.parametrize("settings", [{}, {"completion_only_loss": False}])
def test_the_loss_is_that_of_the_plain_function_on_all_logits(scheme, settings, tiny_llama, tmp_path):
    options = {"gamma": 0.3, "power": 0.4, "alpha": 0.6, "min_prob": 0.001, "max_prob": 0.9}
    trainer = saft(
        tmp_path, tiny_llama, saft_scheme=scheme, **{f"saft_{k}": v for k, v in options.items()}, **settings
    )
    batch = first_batch(trainer)
    found = trainer.compute_loss(trainer.model, dict(batch))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    wanted = saft_loss(tiny_llama(**inputs), batch["labels"], scheme=scheme, **options)
    assert_matches(found, wanted, "fp32")
    gradients = [torch.autograd.grad(loss, list(tiny_llama.parameters())) for loss in (found, wanted)]
    for ours, dense in zip(*gradients, strict=True):
        assert_matches(ours, dense, "model")


def test_one_forward_a_step(tiny_llama, tmp_path):
    trainer = saft(tmp_path, tiny_llama)
    calls = []
    tiny_llama.model.register_forward_hook(lambda *_: calls.append(1))
    trainer.compute_loss(trainer.model, first_batch(trainer))
    assert len(calls) == 1


@pytest.mark.parametrize("scheme", [it for it in SCHEMES if it not in ("deft_cayley", "asft")])
def test_oracle_7_accumulated_batches_are_one_batch(scheme, tiny_llama, tmp_path):
    shapes = ((8, 1), (4, 2), (2, 4), (1, 8))
    found = [
        weights_after(
            saft(
                tmp_path,
                copy.deepcopy(tiny_llama),
                saft_scheme=scheme,
                max_steps=1,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=steps,
            )
        )
        for size, steps in shapes
    ]
    assert all((other - found[0]).abs().max() <= 1e-6 for other in found[1:])
    assert (found[0] - torch.cat([p.detach().flatten() for p in tiny_llama.parameters()])).abs().max() > 1e-3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_oracle_7_a_batch_without_labels_is_a_zero_with_a_gradient(scheme, tiny_llama, tmp_path):
    trainer = saft(tmp_path, tiny_llama, saft_scheme=scheme)
    batch = first_batch(trainer)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or (p.grad == 0).all() for p in tiny_llama.parameters())


@pytest.mark.parametrize(
    "settings",
    [{"packing": True, "max_length": 32}, {"padding_free": True, "max_length": None}],
    ids=["packing", "free"],
)
def test_oracle_7_packed_tokens_weigh_what_padded_ones_do(settings, tiny_llama, tmp_path):
    plain = {"max_steps": 1, "per_device_train_batch_size": 8, "completion_only_loss": False}
    padded = weights_after(saft(tmp_path, copy.deepcopy(tiny_llama), **plain))
    packed = weights_after(saft(tmp_path, copy.deepcopy(tiny_llama), **plain, **settings))
    assert_matches(packed, padded, "fp32")


def test_assistant_only_loss_trains_on_the_assistant_alone(tiny_llama, tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = GENERATION_TEMPLATE
    batches = {}
    for only in (False, True):
        args = SAFTConfig(str(tmp_path), **runs.SETTINGS, assistant_only_loss=only)
        trainer = SAFTTrainer(tiny_llama, args, train_dataset=runs.chats(), processing_class=tokenizer)
        batches[only] = first_batch(trainer)
    labels = batches[True]["labels"]
    assert 0 < (labels != -100).sum() < (batches[False]["labels"] != -100).sum()
    found = trainer.compute_loss(trainer.model, dict(batches[True]))
    wanted = saft_loss(tiny_llama(batches[True]["input_ids"], batches[True]["attention_mask"]), labels)
    assert_matches(found, wanted, "fp32")


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mixtral"])
def test_other_families(family, tiny_model, tmp_path):
    """Tied heads, learned positions, and a mixture, whose auxiliary loss stays TRL's."""
    ours = weights_after(saft(tmp_path, tiny_model(family), saft_gamma=0.0))
    assert_matches(ours, weights_after(runs.make(tmp_path, tiny_model(family))), "exact")


def test_lora_and_gradient_checkpointing(tiny_llama, tmp_path):
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)

    def trained(**settings):
        torch.manual_seed(0)
        model = get_peft_model(copy.deepcopy(tiny_llama), lora)
        trainer = saft(tmp_path, model, **settings)
        trainer.train()
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    plain, checkpointed, nll = trained(), trained(gradient_checkpointing=True), trained(saft_scheme="nll")
    for name, values in plain.items():
        assert_matches(checkpointed[name], values, "model")
        same = torch.equal(nll[name], values)
        assert same == ("lora" not in name), name


def test_quantized_base_with_lora(tiny_llama, tmp_path):
    import hf_ext

    hf_ext.quantize(
        tiny_llama, hf_ext.OSAQConfig(bits=4, group_size=16, dataset=["w1 w2 w3 w4"] * 4, tokenizer=tiny.tokenizer())
    )
    lora = LoraConfig(r=4, target_modules="all-linear")
    trainer = saft(tmp_path, tiny_llama, trainer_settings={"peft_config": lora})
    trainer.train()
    assert all(torch.isfinite(torch.tensor(runs.curve(trainer))))


def test_evaluation_gives_the_same_loss_whatever_the_batches(tiny_llama, tmp_path):
    rows = runs.prompts(8).select([0, 4])  # of equal lengths
    found = []
    for size in (1, 2):
        trainer = saft(tmp_path, tiny_llama, per_device_eval_batch_size=size, trainer_settings={"eval_dataset": rows})
        found.append(trainer.evaluate())
    assert found[0]["eval_nll"] == pytest.approx(found[1]["eval_nll"], rel=1e-5)
    assert found[0]["eval_nll"] > found[0]["eval_loss"] > 0
    assert 0 < found[0]["eval_saft/weight_mean"] < 1


def test_logs_hold_the_plain_loss_the_weights_and_the_probabilities(tiny_llama, tmp_path):
    settings = {"max_steps": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    ours = saft(tmp_path, copy.deepcopy(tiny_llama), **settings)
    theirs = runs.make(tmp_path, copy.deepcopy(tiny_llama), **settings)
    ours.args.report_to = ["a tracker"]
    ours.train(), theirs.train()
    assert runs.curve(ours, "nll") == pytest.approx(runs.curve(theirs), rel=1e-5)
    entry = ours.state.log_history[0]
    shares = [entry[f"saft/probability/{index / 10}"] for index in range(10)]
    assert sum(shares) == pytest.approx(1) and shares[0] > 0.5
    model = copy.deepcopy(tiny_llama)
    batch = ours.data_collator([ours.train_dataset[index] for index in range(8)])
    with torch.no_grad():
        logits = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    p = logits.softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels != -100]
    weights = p / (0.5 + 0.5 * p)
    assert entry["saft/weight_mean"] == pytest.approx(weights.mean().item(), rel=1e-4)
    assert entry["saft/weight_lt_0.1"] == pytest.approx((weights < 0.1).float().mean().item(), rel=1e-4)
    quiet = saft(tmp_path, copy.deepcopy(tiny_llama), **settings)
    quiet.train()
    assert not any("probability" in name for name in quiet.state.log_history[0])


def dense_divergence(reference, model, batch) -> torch.Tensor:
    inputs = batch["input_ids"], batch["attention_mask"]
    old, new = (it(*inputs).logits[:, :-1].log_softmax(-1) for it in (reference, model))
    mask = batch["labels"][:, 1:] != -100
    return ((old.exp() * (old - new)).sum(-1) * mask).sum() / mask.sum()


@pytest.mark.parametrize("peft", [False, True])
def test_asft_adds_the_divergence_from_the_start(peft, tiny_llama, tmp_path):
    model, reference = copy.deepcopy(tiny_llama), copy.deepcopy(tiny_llama)
    if peft:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    trainer = saft(tmp_path, model, saft_scheme="asft", saft_kl_weight=0.7)
    dft = partial(saft_loss, scheme="dft")

    def terms():
        batch = first_batch(trainer)
        outputs = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        found = trainer.compute_loss(trainer.model, dict(batch))
        return found, dft(outputs, batch["labels"]), dense_divergence(reference, trainer.model, batch)

    found, plain, divergence = terms()
    assert divergence.item() == pytest.approx(0, abs=1e-6)
    assert_matches(found, plain, "fp32")
    trainer.train()
    found, plain, divergence = terms()
    assert divergence > 1e-4
    assert_matches(found, plain + 0.7 * divergence, "fp32")
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    assert parameters
    ours, wanted = (torch.autograd.grad(it, parameters) for it in (found, plain + 0.7 * divergence))
    for one, other in zip(ours, wanted, strict=True):
        assert_matches(one, other, "model")


def test_resumed_training_continues_the_curve(tiny_llama, tmp_path):
    settings = {
        "max_steps": 6,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    whole = saft(tmp_path / "whole", copy.deepcopy(tiny_llama), **settings)
    whole.train()
    half = saft(tmp_path / "half", copy.deepcopy(tiny_llama), **{**settings, "max_steps": 6})
    half.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert runs.curve(half) == runs.curve(whole)
    assert runs.curve(half, "nll") == runs.curve(whole, "nll")
    for ours, theirs in zip(half.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_plain_trainer_takes_the_loss_as_a_function(tiny_llama, tmp_path):
    """Of the same model and batches it gives what the trainer gives."""
    ours = saft(tmp_path, copy.deepcopy(tiny_llama), saft_scheme="geometric")
    arguments = TrainingArguments(
        str(tmp_path),
        **{k: v for k, v in runs.SETTINGS.items() if k in inspect.signature(TrainingArguments).parameters},
    )
    plain = Trainer(
        copy.deepcopy(tiny_llama),
        arguments,
        data_collator=ours.data_collator,
        train_dataset=ours.train_dataset,
        compute_loss_func=partial(saft_loss, scheme="geometric"),
    )
    assert_matches(weights_after(plain), weights_after(ours), "fp32")


def test_config_is_read_from_a_command_line_and_saved(tiny_llama, tmp_path):
    parser = TrlParser((SAFTConfig,))
    (args,) = parser.parse_args_and_config(
        ["--output_dir", str(tmp_path), "--saft_scheme", "linear", "--saft_gamma", "0.25", "--bf16", "false"]
    )
    assert (args.saft_scheme, args.saft_gamma) == ("linear", 0.25)
    trainer = SAFTTrainer(tiny_llama, args, train_dataset=runs.prompts(), processing_class=tiny.tokenizer())
    trainer.save_model(str(tmp_path / "saved"))
    saved = torch.load(tmp_path / "saved" / "training_args.bin", weights_only=False)
    assert saved.saft_scheme == "linear"
    assert "saft" not in (tmp_path / "saved" / "config.json").read_text()
    assert trainer.args.to_dict()["saft_gamma"] == 0.25


def test_without_args(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # TRL's default is bf16, which Transformers refuses on a CPU unless told to stay there.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    tiny_llama.config._name_or_path = "team/tiny"
    trainer = SAFTTrainer(tiny_llama, train_dataset=runs.prompts(), processing_class=tiny.tokenizer())
    assert isinstance(trainer.args, SAFTConfig) and trainer.args.output_dir.endswith("tiny-SAFT")


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"saft_scheme": "harmnic"}, "saft_scheme='harmnic' is unknown; allowed: harmonic"),
        ({"saft_gamma": -0.1}, "saft_gamma=-0.1 is outside of its range, 0 to 1"),
        ({"saft_kl_weight": float("inf")}, "saft_kl_weight=inf"),
        ({"saft_min_prob": 0.9, "saft_max_prob": 0.1}, "saft_min_prob=0.9 is above saft_max_prob=0.1"),
        ({"loss_type": "dft"}, "saft_scheme='dft'"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
    ],
)
def test_bad_settings_are_named(settings, words, tmp_path):
    with pytest.raises(ValueError) as error:
        SAFTConfig(str(tmp_path), bf16=False, **settings)
    assert words in str(error.value)


def test_what_would_ignore_the_weights_is_refused(tiny_model, tiny_llama, tmp_path):
    with pytest.raises(TypeError, match="args is a SFTConfig; pass a SAFTConfig"):
        runs.make(tmp_path, tiny_llama, trainer_class=SAFTTrainer, config_class=SFTConfig)
    with pytest.raises(ValueError, match="compute_loss_func would replace the loss of SAFTTrainer"):
        saft(tmp_path, tiny_llama, trainer_settings={"compute_loss_func": saft_loss})
    with pytest.raises(ValueError, match="lm_head"):
        lora = LoraConfig(r=2, target_modules=["lm_head"])
        saft(tmp_path, tiny_model("llama"), trainer_settings={"peft_config": lora})
    with pytest.raises(ValueError, match="asft.*PROMPT_TUNING"):
        prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        saft(tmp_path, tiny_llama, saft_scheme="asft", trainer_settings={"peft_config": prompt})
    model = tiny.llama()
    model.lm_head = nn.Sequential(nn.Linear(32, 64))
    with pytest.raises(ValueError, match="has a Sequential without a plain float weight"):
        saft(tmp_path, model)


def test_deepspeed_sequence_parallelism_is_refused(tiny_llama, tmp_path, monkeypatch):
    class Parallelism:
        sp_enabled, sp_backend, sp_size, cp_enabled, tp_size = True, "deepspeed", 2, False, 1

    init = SFTTrainer.__init__

    def parallel(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.accelerator.state.parallelism_config = Parallelism()

    monkeypatch.setattr(SFTTrainer, "__init__", parallel)
    with pytest.raises(ValueError, match="sp_size=2 with DeepSpeed"):
        saft(tmp_path, tiny_llama)
