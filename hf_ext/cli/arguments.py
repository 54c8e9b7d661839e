"""Arguments that several commands share, and their checks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from .app import UsageError, note


DTYPES = ("auto", "float32", "bfloat16", "float16")

Model = Annotated[str, typer.Argument(help="Hub id, folder of a saved model, or 'demo'.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Dtype = Annotated[str, typer.Option(help=f"Dtype of the float weights: {', '.join(DTYPES)}.")]
DeviceMap = Annotated[str | None, typer.Option(help="Where the model goes: cpu, cuda or auto.", show_default=False)]


def find_model(model: str) -> str:
    """Return what `from_pretrained` takes for `model`; 'demo' is fetched.

    Raises:
        UsageError: if it is a path without a saved model, or no such model can be found.
    """
    if model == "demo":
        from ..hub.demo_model import demo_model

        note("Looking for the demo model ...")
        return demo_model()
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"{model!r} is no saved model: the folder has no config.json.")
        return str(path)
    if path.exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model):
        kind = "a file" if path.exists() else "no folder that exists"
        raise UsageError(f"{model!r} is {kind}; give a folder of a saved model, a Hub id (org/name) or 'demo'.")
    return model


def load_config(source: str):
    """Return the model's config, which tells early and in seconds whether the model can be had."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UsageError(f"Cannot load a model from {source!r}: {str(error).strip().splitlines()[0]}") from error


def load_tokenizer(source: str):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{source!r} has no tokenizer beside the model; save one there: tokenizer.save_pretrained({source!r})."
        ) from error


def check_dtype(dtype: str) -> str:
    from ..core.errors import closest

    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} is unknown.{closest(dtype, DTYPES)}")
    return dtype


def read_text(path: Path) -> str:
    if not path.is_file():
        raise UsageError(f"No such file: {str(path)!r}.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{str(path)!r} is not UTF-8 text: {error}.") from error
