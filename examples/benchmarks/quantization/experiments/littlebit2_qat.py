"""LittleBit-2 under training: its start against LittleBit's and full-rank signs, and the demo model in an hour."""

import copy
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from harness import Measure, data_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
)

import hf_ext
from hf_ext import LittleBit2Config, LittleBit2Trainer, pack
from hf_ext.core.modules import named_linears, replace_module
from hf_ext.hub.folders import cache_folder
from hf_ext.quantizers.littlebit2.functional import StraightThroughSign, distillation_loss


BITS = 0.55
TEACHER = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "steps": 500,
    "batch_size": 16,
    "sequence_length": 128,
    "learning_rate": 2e-3,
    "seed": 0,
}
STEPS, BATCH_SIZE = (50, 200), 8
LEARNING_RATES = (1e-3, 3e-3)
SEEDS = (1, 2, 3)
DEMO_SECONDS = 3600.0


def text(name: str) -> str:
    return data_file(f"wikitext-2-{name}.txt").read_text(encoding="utf-8")


@cache
def tokens() -> tuple[Tensor, Tensor]:
    """Rows of the training and of the held-out text, in a vocabulary made from the former."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.train_from_iterator([text("valid")], trainers.BpeTrainer(vocab_size=TEACHER["vocab_size"]))
    length = TEACHER["sequence_length"]
    ids = [torch.tensor(tokenizer.encode(text(name)).ids) for name in ("valid", "test")]
    return tuple(row[: len(row) // length * length].view(-1, length) for row in ids)


def batches(rows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield rows[torch.randint(len(rows), (size,), generator=generator)]


@cache
def teacher() -> PreTrainedModel:
    """A small Llama trained on the text, kept by the hash of its recipe."""
    recipe = hashlib.sha256(json.dumps(TEACHER).encode()).hexdigest()[:12]
    folder = cache_folder() / "benchmarks" / f"llama-{recipe}"
    if folder.exists():
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(TEACHER["seed"])
    shape = {key: value for key, value in TEACHER.items() if key in LlamaConfig().to_dict()}
    model = LlamaForCausalLM(LlamaConfig(**shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=TEACHER["learning_rate"], weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, TEACHER["learning_rate"], TEACHER["steps"])
    rows = batches(tokens()[0], TEACHER["batch_size"], TEACHER["seed"])
    for _, row in zip(range(TEACHER["steps"]), rows, strict=False):
        model(input_ids=row, labels=row).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(folder)
    return model.eval()


class OneBitLinear(nn.Module):
    """Full-rank signs with a scale a row, trained straight through: the 1-bit baseline."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().clone())
        self.scale = nn.Parameter(linear.weight.detach().abs().mean(1))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.linear(hidden_states, StraightThroughSign.apply(self.weight)) * self.scale


def student(start: str) -> PreTrainedModel:
    model = copy.deepcopy(teacher()).requires_grad_(True)
    if start == "one_bit":
        for name, linear in list(named_linears(model.model)):
            replace_module(model.model, name, OneBitLinear(linear))
    else:
        hf_ext.quantize(model, LittleBit2Config(bits=BITS, rotation=start, trainable=True))
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.requires_grad_(False)
    return model


@torch.no_grad()
def divergence(model: PreTrainedModel) -> float:
    """KL from the teacher on held-out text, nats a token."""
    total, rows = 0.0, tokens()[1][:128]
    for row in rows.split(16):
        logits, wanted = (it(input_ids=row).logits.log_softmax(-1).flatten(0, 1) for it in (model.eval(), teacher()))
        total += F.kl_div(logits, wanted, reduction="sum", log_target=True).item()
    return total / rows.numel()


def train(start: str, learning_rate: float, seed: int) -> list[float]:
    """Held-out KL at the start and after each of `STEPS`."""
    model, found = student(start), []
    found.append(divergence(model))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], learning_rate, weight_decay=0.0)
    rows = batches(tokens()[0], BATCH_SIZE, seed)
    model.train()
    for step, row in zip(range(STEPS[-1]), rows, strict=False):
        outputs = model(input_ids=row, output_hidden_states=True)
        with torch.no_grad():
            wanted = teacher()(input_ids=row, output_hidden_states=True)
        loss = distillation_loss(outputs.logits, wanted.logits, outputs.hidden_states[1:], wanted.hidden_states[1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in STEPS:
            found.append(divergence(model))
            model.train()
    return found


def small_llama(quick: bool) -> Iterator[Measure]:
    """Each start at the learning rate of one grid that is best for it after all steps, then over seeds."""
    curves = {}
    for start in ("joint_itq", "none", "one_bit"):
        rate = min(LEARNING_RATES, key=lambda rate: train(start, rate, seed=0)[-1])
        curves[start] = rate, [train(start, rate, seed) for seed in (SEEDS[:1] if quick else SEEDS)]
    for baseline, words in (("none", "LittleBit's start, no rotation"), ("one_bit", "full-rank signs, about 1 bit")):
        for place, step in enumerate((0, *STEPS)):
            (rate, ours), (other_rate, theirs) = (
                (curves[start][0], [curve[place] for curve in curves[start][1]]) for start in ("joint_itq", baseline)
            )
            setup = (
                f"Llama of 4 x 256, {BITS} bits, batch {BATCH_SIZE} x 128, learning rates {rate:g} and {other_rate:g}"
            )
            spread = stdev(ours) if len(ours) > 1 else None
            name = f"littlebit2_qat_error/{baseline}/{step}"
            yield Measure(name, mean(ours), "held-out KL", words, mean(theirs), setup, len(ours), spread)


class Clock(TrainerCallback):
    """Ends training when its time is up, and says what share of it is left."""

    def __init__(self, seconds: float):
        self.seconds, self.end = seconds, time.monotonic() + seconds

    def left(self, step: int) -> float:
        return max(0.0, self.end - time.monotonic()) / self.seconds

    def on_step_end(self, args, state, control, **kwargs) -> None:
        control.should_training_stop = control.should_training_stop or self.left(state.global_step) == 0.0


def demo_model(quick: bool) -> Iterator[Measure]:
    """The demo model distilled for an hour, or ten minutes; the learning rate falls with the clock."""
    seconds = 600.0 if quick else DEMO_SECONDS
    path = hf_ext.demo_model()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model, original = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
    hf_ext.quantize(model, LittleBit2Config(bits=BITS, trainable=True))
    ids = tokenizer(text("valid"), return_tensors="pt")["input_ids"][0]
    rows = [{"input_ids": row} for row in ids.split(256)[:-1]]

    def perplexity(it: PreTrainedModel) -> float:
        return hf_ext.perplexity(it, tokenizer, text("test"), sequence_length=1024, max_windows=8)

    before, float_perplexity = perplexity(model), perplexity(original)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=100_000,
            per_device_train_batch_size=4,
            bf16=True,
            logging_steps=25,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        )
        clock = Clock(seconds)
        trained = [parameter for name, parameter in model.named_parameters() if "embed" not in name]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
        trainer = LittleBit2Trainer(
            model,
            teacher_model=original,
            hidden_loss_weight=0.0,
            args=arguments,
            train_dataset=rows,
            callbacks=[clock],
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, clock.left)),
        )
        trainer.train()
    after = perplexity(pack(model))
    steps = trainer.state.global_step
    setup = (
        f"SmolLM2-135M-Instruct, {BITS} bits, {steps} steps of 4 x 256 tokens of wikitext-2-valid in {seconds:.0f} s "
        f"on {torch.get_num_threads()} threads, first 8 windows of 1024 of wikitext-2-test, start {before:.3g}"
    )
    yield Measure("littlebit2_qat_demo_ppl", after, "perplexity", "the float model", float_perplexity, setup)


EXPERIMENTS = {"littlebit2_qat": small_llama}
ON_REQUEST = {"littlebit2_qat_demo": demo_model}
