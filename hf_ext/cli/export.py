"""`hf-ext export`: a quantized model in the format of another program."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._public import QUANTIZERS
from ..core.errors import closest
from .app import Result, UsageError, note
from .arguments import Json, Model, find_model, load_config, load_tokenizer
from .quantize import check_output


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..quantizers.export.report import ExportReport


FORMATS = ("gguf-tq2_0", "gguf-tq1_0", "gguf-q2_0-g64", "gguf-q2_0", "gguf-pq2_0", "gptq")


def export(
    model: Model,
    format: Annotated[str, typer.Option(help=f"One of {', '.join(FORMATS)}.", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="GGUF file, or GPTQ folder, to write.", show_default=False)
    ],
    allow_lossy: Annotated[bool, typer.Option("--allow-lossy", help="Merge scales that GGUF blocks span.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    json: Json = False,
) -> Result:
    """Write a quantized model as a GGUF file (llama.cpp) or a GPTQ checkpoint (vLLM, SGLang)."""
    if format not in FORMATS:
        raise UsageError(f"--format {format!r} is unknown.{closest(format, FORMATS)}")
    if format == "gptq" and allow_lossy:
        raise UsageError("--allow-lossy is for GGUF; the GPTQ layout keeps every scale.")
    if format == "gptq":
        check_output(output, overwrite, {"MODEL": model})
    else:
        check_output_file(output, overwrite)
    source = find_model(model)
    config = load_config(source)
    check_quantized(model, config)
    tokenizer = load_tokenizer(source)
    if format != "gptq":
        check_gguf(config, tokenizer)

    from transformers import AutoModelForCausalLM

    note(f"Loading {model} ...")
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    report = write(loaded, tokenizer, format, output, allow_lossy)
    data = {
        "output": str(output),
        "format": format,
        "file_bytes": report.file_bytes,
        "weights": len(report.relative_error),
        "largest_relative_error": report.largest_error,
        "lossy_weights": list(report.lossy),
    }
    return Result(data, str(report))


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, format: str, output: Path, allow_lossy: bool
) -> ExportReport:
    """Write `output` whole, or not at all.

    Raises:
        UsageError: if the model does not fit the format.
    """
    from ..hub.folders import atomic_folder
    from ..quantizers.export import export_gguf, export_gptq

    try:
        if format != "gptq":
            name = format.removeprefix("gguf-").replace("-", "_")
            return export_gguf(model, output, name, tokenizer=tokenizer, allow_lossy=allow_lossy)
        with atomic_folder(output) as folder:
            report = export_gptq(model, folder, tokenizer=tokenizer)
        return dataclasses.replace(report, path=str(output))
    except ValueError as error:
        raise UsageError(str(error)) from error


def check_quantized(model: str, config: PreTrainedConfig) -> None:
    settings = getattr(config, "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    if method not in QUANTIZERS:
        found = "is not quantized" if method is None else f"is quantized with {str(method)!r}"
        raise UsageError(f"{model!r} {found}; export takes a model that `hf-ext quantize` saved.")


def check_gguf(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse what can be known not to fit before the weights are loaded."""
    from ..quantizers.export.gguf_metadata import find_architecture
    from ..quantizers.export.gguf_tokenizer import read_vocabulary

    try:
        find_architecture(config)
        read_vocabulary(tokenizer, config.vocab_size)
    except ValueError as error:
        raise UsageError(str(error)) from error


def check_output_file(output: Path, overwrite: bool) -> None:
    """Refuse an output file that could not be written, or that would lose something, before any work."""
    path = output.resolve()
    if path.is_dir():
        raise UsageError(f"--output {str(output)!r} is a folder; give a file, such as {str(output / 'model.gguf')!r}.")
    if path.exists() and not overwrite:
        raise UsageError(f"--output {str(output)!r} exists; take another name, or --overwrite to replace it.")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--output {str(output)!r}: cannot write in {str(path.parent)!r}.")
