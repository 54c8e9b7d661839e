"""`hf-ext quantize`: quantize a model and save it whole, or not at all."""

from __future__ import annotations

import json as json_module
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._public import QUANTIZERS
from ..core.errors import closest
from .app import Result, UsageError, note
from .arguments import DeviceMap, Dtype, Json, Model, check_dtype, find_model, load_config, load_tokenizer


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Rows = typer.Option(min=1, help="Calibration rows. Default: the method's.", show_default=False)


def quantize(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to save to.", show_default=False)],
    calibration: Annotated[
        str | None, typer.Option(help="Text file, or a set such as wikitext2.", show_default=False)
    ] = None,
    method: Annotated[str, typer.Option(help=f"Method: {', '.join(QUANTIZERS)}.")] = "osaq",
    preset: Annotated[str | None, typer.Option(help="Named options of a trained method: paper or fast.")] = None,
    bits: Annotated[float | None, typer.Option(help="Bits per weight. Default: the method's.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Columns per scale; -1 is the row.")] = None,
    rounding: Annotated[str | None, typer.Option(help="How weights are rounded: rtn or gptq.")] = None,
    num_samples: Annotated[int | None, Rows] = None,
    sequence_length: Annotated[int | None, typer.Option(min=2, help="Tokens per calibration row.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Calibration rows in one forward.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the choice of calibration rows.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Another option of the method: key=value.")] = None,
    checkpoint_dir: Annotated[Path | None, typer.Option(help="Finished blocks; a stopped run resumes here.")] = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that is not empty.")] = False,
    json: Json = False,
) -> Result:
    """Quantize a model and save it with its tokenizer, a model card and a report."""
    kept = {"MODEL": None if model == "demo" else model, "--calibration": calibration}
    check_output(output, overwrite, kept | {"--checkpoint-dir": checkpoint_dir})
    check_dtype(dtype)
    options = {
        "preset": preset,
        "bits": int(bits) if bits and bits.is_integer() else bits,
        "group_size": group_size,
        "rounding": rounding,
        "num_samples": num_samples,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "seed": seed,
        "checkpoint_dir": None if checkpoint_dir is None else str(checkpoint_dir),
    }
    options = {key: value for key, value in options.items() if value is not None} | parse_options(option or [])
    needs_data = build_config(method, options).needs_data  # and a wrong option is told before the model is sought
    check_calibration(calibration, method, needs_data)
    source = find_model(model)
    model_config = load_config(source)
    if getattr(model_config, "quantization_config", None) is not None:
        raise UsageError(f"{model!r} is quantized already; give the float model it was made from.")
    tokenizer = load_tokenizer(source)
    data_options = {"dataset": calibration, "tokenizer": tokenizer} if needs_data else {}
    config = build_config(method, options | data_options)

    from transformers import AutoModelForCausalLM

    note(f"Quantizing {model} with {method} ...")
    quantized = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=config, dtype=dtype, device_map=device_map
    )
    data = save_quantized(quantized, tokenizer, output, source, base_model_id(model))
    return Result(data, _shown(data, quantized.hf_quantizer.report.notes()))


def save_quantized(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output: Path, source: str, base_model: str | None
) -> dict[str, Any]:
    """Save model, tokenizer, report and card to `output`, which changes only once all is written.

    Returns:
        What `--json` prints.
    """
    from ..hub.cards import QuantizedSizes, quantized_card
    from ..hub.folders import atomic_folder

    report, config = model.hf_quantizer.report, model.config.quantization_config
    with atomic_folder(output) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        report.save(folder / "quantization_report.json")
        sizes = QuantizedSizes(float_bytes(model), weight_bytes(folder))
        quantized_card(output.name, source, base_model, config, sizes, report.summary()).save(folder / "README.md")
    return {
        "output": str(output),
        "base_model": base_model or source,
        "quantization_config": config.to_dict(),
        "float_bytes": sizes.float_bytes,
        "quantized_bytes": sizes.quantized_bytes,
        "seconds": round(report.seconds, 1),
        "calibration_tokens": report.calibration_tokens,
        "layers": {status: report.count(status) for status in ("quantized", "skipped")},
    }


def base_model_id(model: str) -> str | None:
    """Return the Hub id of `model` as the user named it, or `None` for a folder."""
    if model == "demo":
        from ..hub.demo_model import MODEL_ID

        return MODEL_ID
    return None if Path(model).expanduser().is_dir() else model


def weight_bytes(folder: str | Path) -> int:
    """Return the bytes of the safetensors files in `folder`."""
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def float_bytes(model: PreTrainedModel) -> int:
    """Return the bytes that the weights of `model` take unquantized, in its dtype."""
    import torch
    from transformers import AutoModelForCausalLM

    config = type(model.config).from_dict(model.config.to_dict())
    del config.quantization_config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=model.dtype).num_parameters() * model.dtype.itemsize


def build_config(method: str, options: dict[str, Any]):
    """Return the method's config.

    Raises:
        UsageError: for an unknown method or option, or a value that the method does not take.
    """
    if method not in QUANTIZERS:
        raise UsageError(f"--method {method!r} is unknown.{closest(method, QUANTIZERS)}")
    from importlib import import_module

    module, _, name = QUANTIZERS[method][0].partition(":")
    try:
        return getattr(import_module(module), name)(**options)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def parse_options(options: list[str]) -> dict[str, Any]:
    """Return `key=value` pairs as a dict; a value that is JSON (0.1, true, [1, 2]) is read as such."""
    parsed = {}
    for pair in options:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--option {pair!r} is no key=value, such as --option damp_percent=0.05.")
        try:
            parsed[key] = json_module.loads(value)
        except ValueError:
            parsed[key] = value
    return parsed


def check_calibration(calibration: str | None, method: str, needs_data: bool) -> None:
    """Refuse data missing or not wanted, and tell a path that does not exist from the name of a set."""
    if needs_data and calibration is None:
        raise UsageError(f"--method {method} learns from text: give --calibration, a file or a set such as wikitext2.")
    if calibration is None:
        return
    if not needs_data:
        raise UsageError(f"--calibration: --method {method} reads no data; leave it out.")
    looks_like_path = Path(calibration).suffix in (".txt", ".json", ".jsonl", ".csv", ".parquet")
    if not Path(calibration).exists() and (looks_like_path or calibration.startswith((".", "/", "~"))):
        raise UsageError(f"--calibration: no such file: {calibration!r}.")


def check_output(output: Path, overwrite: bool, kept: dict[str, str | Path | None] | None = None) -> None:
    """Refuse an output folder that could not be written, or that would lose something, before any work.

    Args:
        kept: paths that the run reads or keeps, by the name of the option; none may be `output` or lie under it.
    """
    folder = output.resolve()
    for option, path in (kept or {}).items():
        if path is not None and Path(path).exists() and Path(path).resolve().is_relative_to(folder):
            raise UsageError(f"{option} {str(path)!r} lies in --output {str(output)!r}, which is replaced as a whole.")
    checkpoints = (kept or {}).get("--checkpoint-dir")
    if checkpoints is not None and Path(checkpoints).resolve().is_relative_to(folder):
        raise UsageError(f"--checkpoint-dir {str(checkpoints)!r} lies in --output; give a folder beside it.")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {str(output)!r} is a file; give a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise UsageError(f"--output {str(output)!r} is not empty; take another folder, or --overwrite to replace it.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise UsageError(f"--output {str(output)!r} holds no saved model, so --overwrite does not delete it.")
    if os.path.ismount(folder) or folder == Path.cwd():
        raise UsageError(f"--output {str(output)!r} cannot be replaced as a whole; give a folder below it.")
    existing = next(parent for parent in folder.parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"--output {str(output)!r}: cannot write in {str(existing)!r}.")


def _shown(data: dict[str, Any], notes: dict[str, list[str]]) -> str:
    lines = [
        f"{data['layers']['quantized']} linears quantized, {data['layers']['skipped']} skipped, "
        f"{data['float_bytes'] / 1e6:.1f} MB -> {data['quantized_bytes'] / 1e6:.1f} MB, {data['seconds']:.0f} s"
    ]
    lines += [f"{text}: {', '.join(layers[:3])}{' ...' if len(layers) > 3 else ''}" for text, layers in notes.items()]
    return "\n".join([*lines, f"Saved to {data['output']}"])
