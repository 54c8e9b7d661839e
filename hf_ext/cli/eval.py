"""`hf-ext eval`: measure a model, quantized or not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .app import Result, UsageError
from .arguments import DeviceMap, Dtype, Json, Model, check_dtype, find_model, load_config, load_tokenizer, read_text


def evaluate(
    model: Model,
    perplexity: Annotated[Path, typer.Option(help="Text file to measure on.", show_default=False)],
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens in a window.")] = 1024,
    max_windows: Annotated[int | None, typer.Option(min=1, help="Windows from the start. Default: all.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in one forward.")] = 1,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    json: Json = False,
) -> Result:
    """Measure the perplexity of a model on a text."""
    text = read_text(perplexity)
    if not text.strip():
        raise UsageError(f"{str(perplexity)!r} is empty.")
    check_dtype(dtype)
    source = find_model(model)
    limit = getattr(load_config(source).get_text_config(decoder=True), "max_position_embeddings", None)
    if limit and sequence_length > limit:
        raise UsageError(f"--sequence-length {sequence_length}: the model has {limit} positions.")
    tokenizer = load_tokenizer(source)

    from transformers import AutoModelForCausalLM

    import hf_ext

    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=device_map)
    start = time.perf_counter()
    value = hf_ext.perplexity(
        loaded,
        tokenizer,
        text,
        sequence_length=sequence_length,
        max_windows=max_windows,
        batch_size=batch_size,
    )
    data = {
        "model": model,
        "text": str(perplexity),
        "perplexity": value,
        "sequence_length": sequence_length,
        "max_windows": max_windows,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "seconds": round(time.perf_counter() - start, 1),
    }
    return Result(data, f"{model}: perplexity {value:.3f} on {perplexity} (windows of {sequence_length} tokens)")
