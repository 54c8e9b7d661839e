"""`hf-ext demo`: the whole path on a small real model: quantize, save, load in a new process, compare."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .app import Result, note
from .arguments import Json, find_model, load_tokenizer
from .quantize import build_config, save_quantized, weight_bytes


if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# What the demo runs, in one place.
METHOD = "osaq"
OPTIONS = {"bits": 3, "group_size": 64, "rounding": "gptq", "sequence_length": 512, "seed": 0}
QUESTION = "What is the capital of France?"
ANSWER_TOKENS = 32
RELOADED_LOGITS = """
import sys
import torch
from safetensors.torch import load_file, save_file
import hf_ext
from transformers import AutoModelForCausalLM
folder, tokens, logits, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
with torch.no_grad():
    save_file({"logits": model(**load_file(tokens)).logits}, logits)
"""


@dataclass(frozen=True)
class Measured:
    """One model in the demo's table."""

    name: str
    perplexity: float
    weight_bytes: int
    answer: str


def demo(json: Json = False) -> Result:
    """Quantize a small real model, load it again in a new process, and compare perplexity, size and an answer.

    Needs no data and, once the model is in the cache, no network. Takes a few minutes on two cores.
    """
    import torch
    from transformers import AutoModelForCausalLM

    import hf_ext

    from ..hub.demo_model import MODEL_ID
    from ..hub.demo_text import demo_text
    from ..hub.folders import cache_folder

    source = find_model("demo")
    tokenizer = load_tokenizer(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    note("Finding text to calibrate and to measure on (the model writes it where there is no other) ...")
    text = demo_text(model, tokenizer)
    note(f"Text: {text.source}. Measuring the float model ...")

    def measure(model: PreTrainedModel, name: str, folder: str | Path) -> Measured:
        value = hf_ext.perplexity(model, None, text.held_out, sequence_length=text.sequence_length)
        return Measured(name, value, weight_bytes(folder), answer(model, tokenizer))

    before = measure(model, "float32", source)
    del model

    options = OPTIONS | {"dataset": text.calibration, "tokenizer": tokenizer}
    note(f"Quantizing with {METHOD}, {OPTIONS['bits']} bits, group size {OPTIONS['group_size']} ...")
    quantized = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=build_config(METHOD, options), dtype=torch.float32
    )
    output = cache_folder() / f"SmolLM2-135M-Instruct-{METHOD}-{OPTIONS['bits']}bit"
    saved = save_quantized(quantized, tokenizer, output, source, MODEL_ID)
    note("Loading it in a new process ...")
    identical = reloads_identically(quantized, output, text.held_out[None, : text.sequence_length])
    after = measure(quantized, f"{METHOD}, {OPTIONS['bits']} bits", output)
    data = {
        "text": text.source,
        "question": QUESTION,
        "models": [vars(before), vars(after)],
        "reload_is_identical": identical,
        **saved,
    }
    if not identical:
        raise RuntimeError(f"the model in {output} gives other logits than the one that was saved there")
    return Result(data, table([before, after], text.source, output))


def reloads_identically(model: PreTrainedModel, folder: Path, input_ids: Tensor) -> bool:
    """Return whether a new process that loads `folder` computes the very logits of `model`."""
    import torch
    from safetensors.torch import load_file, save_file

    with torch.no_grad():
        expected = model(input_ids=input_ids).logits
    with tempfile.TemporaryDirectory() as work:
        tokens, logits = Path(work) / "tokens.safetensors", Path(work) / "logits.safetensors"
        save_file({"input_ids": input_ids.contiguous()}, tokens)
        command = [sys.executable, "-c", RELOADED_LOGITS, str(folder), str(tokens), str(logits)]
        done = subprocess.run([*command, str(torch.get_num_threads())], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"loading {folder} in a new process failed: {done.stderr.strip().splitlines()[-1]}")
        return torch.equal(load_file(logits)["logits"], expected)


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the greedy answer to `QUESTION`."""
    messages = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def table(models: list[Measured], source: str, output: Path) -> Table:
    """Return the demo's result as a table."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table(
        title=f"SmolLM2-135M-Instruct, perplexity on {source}",
        caption=f"A new process loads it with equal logits, bit for bit.\nSaved to {escape(str(output))}",
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("model", no_wrap=True)
    shown.add_column("perplexity", justify="right", no_wrap=True)
    shown.add_column("size on disk", justify="right", no_wrap=True)
    shown.add_column(f"answer to: {QUESTION}")
    for model in models:
        size = f"{model.weight_bytes / 1e6:.0f} MB"
        shown.add_row(model.name, f"{model.perplexity:.2f}", size, escape(model.answer))
    return shown
