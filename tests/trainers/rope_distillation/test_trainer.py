"""RoPE-perturbed self-distillation in real runs of the trainer, beside TRL's own and beside two plain forwards."""

import copy
from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from trl import TrlParser

from hf_ext import RopeDistillationConfig, RopeDistillationTrainer
from hf_ext.trainers.rope_distillation.functional import PERTURBATIONS, Draw
from tests import tiny
from tests.numerics import assert_matches
from tests.trainers import runs


MODES = ("concat", "shared_prefix")
psd = partial(runs.make, trainer_class=RopeDistillationTrainer, config_class=RopeDistillationConfig)


def text(rows: int = 8, length: int = 20) -> Dataset:
    """Documents of unequal lengths."""
    return Dataset.from_dict(
        {
            "text": [
                " ".join(f"w{(7 * row + 3 * k + k * k) % 50}" for k in range(length - row % 5)) for row in range(rows)
            ]
        }
    )


def weights_after(trainer) -> Tensor:
    trainer.train()
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def batch_with_views(trainer) -> dict[str, Tensor]:
    trainer.model.train()
    (batch,), _ = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, torch.device("cpu"))
    return batch


def dense_divergence(student: Tensor, teacher: Tensor, beta: float = 1.0, temperature: float = 1.0) -> Tensor:
    student, teacher = ((it / temperature).log_softmax(-1) for it in (student, teacher.detach()))
    if beta == 1:
        return (student.exp() * (student - teacher)).sum(-1)
    return (teacher.exp() * (teacher - student)).sum(-1)


def dense_loss(model, batch, weight: float = 1.0, **options) -> Tensor:
    """Of two plain forwards on all logits, an explicit mask each."""
    mask = batch["attention_mask"]
    real = mask.bool()[:, None, :] & torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()
    allowed = (real | torch.eye(mask.shape[1], dtype=torch.bool))[:, None]
    added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    views = [
        model(batch["input_ids"], attention_mask=added, position_ids=ids).logits[:, :-1]
        for ids in (torch.arange(mask.shape[1]).expand_as(mask), batch["perturbed_position_ids"])
    ]
    labels = batch["labels"][:, 1:]
    log_probs = views[0].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    counted = labels != -100
    nll = -(log_probs * counted).sum() / counted.sum()
    suffix = counted & batch["suffix"][:, :-1]
    divergence = (dense_divergence(views[1], views[0], **options) * suffix).sum() / suffix.sum()
    return nll + weight * divergence


@pytest.mark.parametrize("mode", MODES)
def test_oracle_1_without_weight_it_is_trl_s_trainer(mode, tiny_llama, tmp_path):
    plain = runs.make(tmp_path, copy.deepcopy(tiny_llama), train_dataset=text())
    ours = psd(tmp_path, copy.deepcopy(tiny_llama), train_dataset=text(), psd_weight=0.0, psd_view_mode=mode)
    with_views = psd(tmp_path, copy.deepcopy(tiny_llama), train_dataset=text(), psd_view_mode=mode)
    expected = weights_after(plain)
    assert torch.equal(weights_after(ours), expected)
    assert runs.curve(ours) == runs.curve(plain)
    assert (weights_after(with_views) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("perturbation", ["suffix_skip", "cyclic_shift"])
def test_oracle_1_no_perturbation_no_divergence(mode, perturbation, tiny_llama, tmp_path):
    trainer = psd(
        tmp_path, tiny_llama, train_dataset=text(), psd_view_mode=mode, psd_perturbation=perturbation, psd_weight=1e6
    )
    trainer._draw = lambda tokens, step: Draw(3, 0)
    batch = batch_with_views(trainer)
    assert batch["num_view_items"] > 20
    plain = runs.make(tmp_path, copy.deepcopy(tiny_llama), train_dataset=text())
    found = trainer.compute_loss(trainer.model, batch)
    wanted = plain.compute_loss(plain.model, next(iter(plain.get_train_dataloader())))
    assert found.item() == pytest.approx(wanted.item(), abs=0.5)  # a million times what is left of the divergence
    total, count = trainer._token_sums["train"]["view_kl"].tolist()
    assert count == batch["num_view_items"] and abs(total / count) < 1e-6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("options", [{}, {"beta": 0.0}, {"temperature": 2.0}, {"perturbation": "cyclic_shift"}])
def test_oracles_4_and_5_loss_and_gradients_are_those_of_two_forwards(mode, attention, options, tmp_path):
    model = tiny.llama(attn_implementation=attention)
    settings = {f"psd_{name}": value for name, value in options.items()}
    trainer = psd(tmp_path, model, train_dataset=text(), psd_view_mode=mode, psd_weight=0.7, **settings)
    batch = batch_with_views(trainer)
    options = {name: value for name, value in options.items() if name != "perturbation"}
    found, wanted = trainer.compute_loss(model, dict(batch)), dense_loss(model, batch, 0.7, **options)
    assert_matches(found, wanted, "fp32")
    parameters = list(model.parameters())
    for ours, dense in zip(*(torch.autograd.grad(it, parameters) for it in (found, wanted)), strict=True):
        assert_matches(ours, dense, "model")


@pytest.mark.parametrize("perturbation", ["chunk_permutation", "nope"])
def test_ablations_are_two_forwards_too(perturbation, tiny_llama, tmp_path):
    trainer = psd(tmp_path, tiny_llama, train_dataset=text(), psd_perturbation=perturbation)
    batch = batch_with_views(trainer)
    assert_matches(trainer.compute_loss(tiny_llama, dict(batch)), dense_loss(tiny_llama, batch), "fp32")


def test_oracle_4_reverse_is_not_forward_and_the_teacher_has_no_gradient(tiny_llama, tmp_path):
    losses, gradients = [], []
    for beta in (1.0, 0.0):
        trainer = psd(tmp_path, copy.deepcopy(tiny_llama), train_dataset=text(), psd_beta=beta)
        batch = batch_with_views(trainer)
        outputs = trainer.model(**_forward_inputs(batch), fused_lm_head=True)
        losses.append(outputs.view_kl.sum().item())
        gradients.append(torch.autograd.grad(outputs.view_kl.sum(), list(trainer.model.parameters())))
    assert abs(losses[0] - losses[1]) > 1e-3
    # A gradient to the teacher would cancel that of the student for the bias of all logits, and double others.
    reference = copy.deepcopy(tiny_llama)
    trainer = psd(tmp_path, reference, train_dataset=text())
    batch = batch_with_views(trainer)
    wanted = torch.autograd.grad(
        dense_loss(reference, batch, 1.0) - dense_loss(reference, batch, 0.0), list(reference.parameters())
    )
    count = batch["num_view_items"]
    for ours, dense in zip(gradients[0], wanted, strict=True):
        assert (ours / count - dense).norm() <= 1e-4 * max(1e-3, dense.norm())


def _forward_inputs(batch) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "num_view_items"} | {"use_cache": False}


@pytest.mark.parametrize("mode", MODES)
def test_oracles_3_and_7_prefix_stays_and_the_suffix_still_sees_it(mode, tiny_llama, tmp_path):
    """Were positions that jump taken for another document, the suffix would be the suffix run alone."""
    trainer = psd(tmp_path, tiny_llama, train_dataset=text(), psd_view_mode=mode)
    batch = batch_with_views(trainer)
    hidden = {}
    from hf_ext.trainers.rope_distillation.views import Arrangement

    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    arrangement = Arrangement(
        inputs,
        batch["perturbed_position_ids"],
        batch["suffix"],
        shared_prefix=mode == "shared_prefix",
        attention="sdpa",
        dtype=torch.float32,
    )
    with torch.no_grad():
        states = tiny_llama.model(**arrangement.inputs, use_cache=False).last_hidden_state
        hidden["standard"], hidden["perturbed"] = arrangement.standard(states), arrangement.perturbed(states)
        plain = tiny_llama.model(**inputs, use_cache=False).last_hidden_state
    real, suffix = batch["attention_mask"].bool(), batch["suffix"]
    assert_matches(hidden["standard"][real], plain[real], "fp32")
    if mode == "concat":
        assert torch.equal(hidden["perturbed"][real & ~suffix], hidden["standard"][real & ~suffix])
    assert (hidden["perturbed"] - plain)[suffix].norm(dim=-1).max() > 1e-2
    row = int(suffix.sum(1).argmax())
    start = int(suffix[row].int().argmax())
    with torch.no_grad():
        alone = tiny_llama.model(batch["input_ids"][row : row + 1, start:]).last_hidden_state[0]
    own = suffix[row][start:]
    assert (hidden["perturbed"][row, start:] - alone)[own].norm(dim=-1).min() > 1e-2


def test_oracle_2_a_shift_of_all_tokens_is_none(tiny_llama, tmp_path):
    trainer = psd(tmp_path, tiny_llama, train_dataset=text())
    batch = batch_with_views(trainer)
    batch["perturbed_position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]) + 50
    batch["suffix"] = batch["attention_mask"].bool()
    outputs = trainer.model(**_forward_inputs(batch), fused_lm_head=True)
    assert outputs.view_kl.abs().max() < 1e-4


def test_oracle_8_a_sliding_window_forgets_the_prefix(tmp_path):
    """In one layer of a window of 6 only the five tokens that still see the prefix change."""
    model = tiny.mistral(num_hidden_layers=1, sliding_window=6)
    rows = Dataset.from_dict({"text": [" ".join(f"w{(3 * k + k * k) % 50}" for k in range(24))]})
    trainer = psd(tmp_path, model, train_dataset=rows, per_device_train_batch_size=1)
    trainer._draw = lambda tokens, step: Draw(10, 7)
    batch = batch_with_views(trainer)
    outputs = model(**_forward_inputs(batch), fused_lm_head=True)
    changed = (outputs.view_kl[0].abs() > 1e-5).nonzero()[:, 0].tolist()
    assert changed == list(range(10, 15))
    with pytest.raises(ValueError, match="sliding_attention.*use 'concat' with padded rows"):
        psd(tmp_path, tiny.mistral(), train_dataset=rows, psd_view_mode="shared_prefix")


@pytest.mark.parametrize("mode", MODES)
def test_oracle_9_padding_and_the_order_of_rows_change_nothing(mode, tiny_llama, tmp_path):
    trainer = psd(tmp_path, tiny_llama, train_dataset=text(), psd_view_mode=mode, pad_to_multiple_of=1)
    batch = batch_with_views(trainer)
    whole = trainer.compute_loss(tiny_llama, dict(batch))
    order = torch.tensor([2, 0, 3, 1])
    permuted = {name: value[order] if value.ndim else value for name, value in batch.items()}
    assert_matches(trainer.compute_loss(tiny_llama, permuted), whole, "fp32")
    fill = {"labels": -100, "input_ids": 5}
    longer = {
        name: torch.nn.functional.pad(value, (0, 3), value=fill.get(name, 0)) if value.ndim else value
        for name, value in batch.items()
    }
    assert_matches(trainer.compute_loss(tiny_llama, longer), whole, "fp32")


@pytest.mark.parametrize("mode", MODES)
def test_accumulated_batches_are_one_batch(mode, tiny_llama, tmp_path):
    found = [
        weights_after(
            psd(
                tmp_path,
                copy.deepcopy(tiny_llama),
                train_dataset=text(),
                psd_view_mode=mode,
                max_steps=1,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=8 // size,
            )
        )
        for size in (8, 4, 1)
    ]
    assert all((other - found[0]).abs().max() <= 2e-6 for other in found[1:])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("settings", [{"packing": True, "max_length": 64}, {"padding_free": True, "max_length": None}])
def test_documents_in_a_row_are_perturbed_as_in_rows_of_their_own(settings, attention, mode, tmp_path):
    shape = {"max_steps": 1, "per_device_train_batch_size": 8, "train_dataset": text(), "psd_view_mode": mode}
    model = tiny.llama(attn_implementation=attention)
    padded = weights_after(psd(tmp_path, copy.deepcopy(model), **shape))
    packed = weights_after(psd(tmp_path, copy.deepcopy(model), **shape, **settings))
    assert_matches(packed, padded, "fp32")


def varlen(module, query, key, value, attention_mask, scaling, cu_seq_lens_q=None, dropout=0.0, **kwargs):
    """What flash attention does with the bounds of the documents, in torch."""
    assert attention_mask is None and query.shape[0] == 1
    outputs = torch.zeros_like(query)
    for start, end in zip(cu_seq_lens_q, cu_seq_lens_q[1:], strict=False):
        own = [it[:, :, start:end] for it in (query, key, value)]
        outputs[:, :, start:end] = torch.nn.functional.scaled_dot_product_attention(
            *own, is_causal=True, scale=scaling, enable_gqa=True
        )
    return outputs.transpose(1, 2).contiguous(), None


def test_padding_free_rows_under_flash_attention(tiny_llama, tmp_path, monkeypatch):
    """Its bounds come from the documents; the attention itself is emulated, as it needs a GPU."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("emulated_flash", varlen)
    AttentionMaskInterface.register("emulated_flash", lambda *args, **kwargs: None)
    shape = {"max_steps": 1, "per_device_train_batch_size": 8, "train_dataset": text()}
    padded = weights_after(psd(tmp_path, copy.deepcopy(tiny_llama), **shape))
    tiny_llama.config._attn_implementation_internal = "emulated_flash"  # its setter would look for the package
    packed = weights_after(psd(tmp_path, tiny_llama, **shape, padding_free=True, max_length=None))
    assert_matches(packed, padded, "fp32")


@pytest.mark.parametrize("mode", MODES)
def test_a_mixture_s_auxiliary_loss_is_of_the_standard_view(mode, tiny_model, tmp_path):
    settings = {"train_dataset": text(), "router_aux_loss_coef": 0.5, "psd_view_mode": mode}
    trainer = psd(tmp_path, tiny_model("mixtral"), **settings)
    trainer._draw = lambda tokens, step: Draw(len(tokens), 0)
    plain = runs.make(tmp_path, tiny_model("mixtral"), train_dataset=text(), router_aux_loss_coef=0.5)
    found = trainer.compute_loss(trainer.model, batch_with_views(trainer))
    plain.model.train()
    wanted = plain.compute_loss(plain.model, next(iter(plain.get_train_dataloader())))
    assert_matches(found, wanted, "fp32")
    assert trainer._metrics["train"]["aux_loss"][0] == pytest.approx(plain._metrics["train"]["aux_loss"][0], rel=1e-5)


def test_softcapped_logits(tmp_path):
    model = tiny.build("gemma2", **{**tiny._LLAMA_LIKE, "final_logit_softcapping": 2.0, "sliding_window": 8})
    trainer = psd(tmp_path, model, train_dataset=text())
    batch = batch_with_views(trainer)
    count = batch["num_view_items"]
    outputs = model(**_forward_inputs(batch), fused_lm_head=True)
    logits = [
        model(batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=ids).logits[:, :-1]
        for ids in (
            torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]),
            batch["perturbed_position_ids"],
        )
    ]
    mask = (batch["labels"][:, 1:] != -100) & batch["suffix"][:, :-1]
    wanted = (dense_divergence(logits[1], logits[0]) * mask).sum() / count
    assert_matches(outputs.view_kl.sum() / count, wanted, "fp32")


def test_prompt_completion_data_counts_labels_only(tiny_llama, tmp_path):
    trainer = psd(tmp_path, tiny_llama)
    batch = batch_with_views(trainer)
    assert 0 < batch["num_view_items"] < batch["suffix"].sum()
    assert_matches(trainer.compute_loss(tiny_llama, dict(batch)), dense_loss(tiny_llama, batch), "fp32")


def test_no_label_in_any_suffix_is_a_zero_with_a_gradient(tiny_llama, tmp_path):
    trainer = psd(tmp_path, tiny_llama)
    batch = batch_with_views(trainer)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = trainer.compute_loss(tiny_llama, batch)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or (p.grad == 0).all() for p in tiny_llama.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_lora_and_gradient_checkpointing(mode, tiny_llama, tmp_path):
    def trained(**settings):
        torch.manual_seed(0)
        model = get_peft_model(copy.deepcopy(tiny_llama), LoraConfig(r=4, target_modules="all-linear"))
        trainer = psd(tmp_path, model, train_dataset=text(), psd_view_mode=mode, **settings)
        trainer.train()
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    plain, checkpointed, sft = trained(), trained(gradient_checkpointing=True), trained(psd_weight=0.0)
    for name, values in plain.items():
        assert_matches(checkpointed[name], values, "model")
        assert torch.equal(sft[name], values) == ("lora" not in name), name


def test_with_adapters_that_do_nothing_the_teacher_is_the_same(tiny_llama, tmp_path):
    plain = psd(tmp_path, copy.deepcopy(tiny_llama), train_dataset=text())
    adapted = psd(tmp_path, get_peft_model(tiny_llama, LoraConfig(r=4)), train_dataset=text())
    losses = [it.compute_loss(it.model, batch_with_views(it)) for it in (plain, adapted)]
    assert_matches(losses[1], losses[0], "fp32")


def test_evaluation_is_the_plain_loss_and_the_same_every_time(tiny_llama, tmp_path):
    settings = {"train_dataset": text(), "trainer_settings": {"eval_dataset": text(4)}}
    ours = psd(tmp_path, copy.deepcopy(tiny_llama), **settings)
    plain = runs.make(tmp_path, copy.deepcopy(tiny_llama), **settings)
    first, second, theirs = ours.evaluate(), ours.evaluate(), plain.evaluate()
    assert first["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-6)
    assert first["eval_view_kl"] == second["eval_view_kl"] > 1e-3
    ours.train()
    assert ours.evaluate()["eval_view_kl"] != first["eval_view_kl"]


def test_logs_hold_both_terms(tiny_llama, tmp_path):
    trainer = psd(
        tmp_path, tiny_llama, train_dataset=text(), psd_weight=0.3, gradient_accumulation_steps=2, max_steps=1
    )
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["loss"] == pytest.approx(entry["nll"] + 0.3 * entry["view_kl"], rel=1e-4)


def test_resumed_training_continues_the_curve(tiny_llama, tmp_path):
    settings = {
        "max_steps": 6,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    whole = psd(tmp_path / "whole", copy.deepcopy(tiny_llama), train_dataset=text(), **settings)
    whole.train()
    half = psd(tmp_path / "half", copy.deepcopy(tiny_llama), train_dataset=text(), **settings)
    half.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert runs.curve(half) == runs.curve(whole)
    assert runs.curve(half, "view_kl") == runs.curve(whole, "view_kl")
    for ours, theirs in zip(half.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_draws_hang_on_seed_step_and_tokens_and_leave_the_global_generator_alone(tiny_llama, tmp_path):
    trainer = psd(tmp_path, tiny_llama, train_dataset=text())
    before = torch.get_rng_state()
    tokens = torch.arange(40)
    draws = {(step, length): trainer._draw(tokens[:length], step) for step in range(20) for length in (39, 40)}
    assert torch.equal(torch.get_rng_state(), before)
    assert len({(it.split, it.amount) for it in draws.values()}) > 25
    assert trainer._draw(tokens, 3) == draws[3, 40]
    trainer.args.seed += 1
    assert trainer._draw(tokens, 3) != draws[3, 40]


def test_config_is_read_from_a_command_line(tmp_path):
    flags = [
        "--output_dir",
        str(tmp_path),
        "--bf16",
        "false",
        "--psd_perturbation",
        "nope",
        "--psd_max_position",
        "64",
    ]
    (args,) = TrlParser((RopeDistillationConfig,)).parse_args_and_config(flags)
    assert (args.psd_perturbation, args.psd_max_position, args.psd_weight) == ("nope", 64, 1.0)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"psd_weight": -1.0}, "psd_weight=-1.0 is outside of its range, 0 to inf"),
        ({"psd_weight": "1"}, "psd_weight='1' is a str"),
        ({"psd_min_split": 0.5, "psd_max_split": 0.4}, "psd_min_split=0.5 is above psd_max_split=0.4"),
        ({"psd_temperature": 0.0}, "psd_temperature=0.0"),
        ({"psd_beta": 0.5}, "psd_beta=0.5: take 1 for the reverse divergence or 0"),
        ({"psd_perturbation": "skip"}, f"psd_perturbation='skip' is unknown; allowed: {', '.join(PERTURBATIONS)}"),
        ({"psd_view_mode": "both"}, "psd_view_mode='both' is unknown; allowed: concat, shared_prefix"),
        ({"psd_max_position": 1}, "psd_max_position=1"),
        ({"psd_view_mode": "shared_prefix", "psd_perturbation": "nope"}, "use psd_view_mode='concat'"),
        ({"loss_type": "dft"}, "loss_type='dft'"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
    ],
)
def test_bad_settings_are_named(settings, words, tmp_path):
    with pytest.raises(ValueError) as error:
        RopeDistillationConfig(str(tmp_path), bf16=False, **settings)
    assert words in str(error.value)


ROPE = {"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "build, words",
    [
        (tiny.gpt2, "gpt2 is no decoder-only model with rotary positions"),
        (tiny.opt, "opt is no decoder-only model with rotary positions"),
        (lambda: tiny.llama(rope_parameters={**ROPE, "rope_type": "dynamic"}), "rope_type='dynamic' in llama"),
        (
            lambda: tiny.llama(
                rope_parameters={
                    **ROPE,
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                }
            ),
            "rope_type='longrope' in llama",
        ),
        (
            lambda: tiny.llama(
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
            ),
            "mrope_section",
        ),
    ],
)
def test_positions_that_cannot_be_perturbed_are_refused(build, words, tmp_path):
    with pytest.raises(ValueError) as error:
        psd(tmp_path, build(), train_dataset=text())
    assert words in str(error.value)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_scaled_rotations_are_taken(kind, tmp_path):
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    model = tiny.llama(rope_parameters={**ROPE, "rope_type": kind, **more})
    trainer = psd(tmp_path, model, train_dataset=text())
    batch = batch_with_views(trainer)
    assert_matches(trainer.compute_loss(model, dict(batch)), dense_loss(model, batch), "fp32")


def test_what_cannot_be_seen_twice_is_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="PROMPT_TUNING puts virtual tokens in front"):
        prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        psd(tmp_path, tiny_model("llama"), trainer_settings={"peft_config": prompt})
    with pytest.raises(ValueError, match="compute_loss_func would replace the loss of RopeDistillationTrainer"):
        psd(tmp_path, tiny_model("llama"), trainer_settings={"compute_loss_func": lambda *_: 0})
    with pytest.raises(TypeError, match="pass a RopeDistillationConfig"):
        runs.make(tmp_path, tiny_model("llama"), trainer_class=RopeDistillationTrainer)
    with pytest.raises(ValueError, match="attn_implementation='flex_attention'"):
        psd(tmp_path, tiny.llama(attn_implementation="flex_attention"), psd_view_mode="shared_prefix")
    with pytest.warns(UserWarning, match=r"Dropout in .*lora_dropout"):
        lora = LoraConfig(r=2, lora_dropout=0.1)
        psd(tmp_path, tiny_model("llama"), trainer_settings={"peft_config": lora})
