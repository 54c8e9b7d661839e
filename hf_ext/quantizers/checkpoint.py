"""Finished blocks of a quantization run on disk, so that a killed run goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .blockwise import LayerResult


IDENTITY = "run.json"

# Block -> linear -> name of a parameter -> its value.
WindowState = dict[int, dict[str, dict[str, Tensor]]]


class RunCheckpoint:
    """A folder of finished blocks. A file appears only when it is whole: it is written beside and renamed.

    Args:
        folder: where to keep them; made if absent.
        identity: what must be the same for a block to be taken: model, calibration data and options.
        packed_types: the dataclasses that the method's packed weights are of.

    Raises:
        ValueError: if the folder holds another run; the message says what differs.
    """

    def __init__(self, folder: str | os.PathLike, identity: dict[str, Any], packed_types: tuple[type, ...]):
        self.folder = Path(folder)
        self._packed_types = {kind.__name__: kind for kind in packed_types}
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / IDENTITY
        identity = json.loads(json.dumps(identity))
        if path.exists():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise OSError(
                    f"{path} is damaged ({error}). Take an empty folder: checkpoint_dir={str(folder)!r}."
                ) from error
            differing = [key for key in identity | found if identity.get(key) != found.get(key)]
            if differing:
                was = ", ".join(f"{key}={found.get(key)!r} (now {identity.get(key)!r})" for key in differing)
                raise ValueError(
                    f"checkpoint_dir={str(folder)!r} belongs to another run: {was}. Take an empty folder, "
                    "or run with what it was started with."
                )
        else:
            _write(path, json.dumps(identity, indent=1))

    def load_block(self, index: int) -> dict[str, LayerResult] | None:
        """Return the results of block `index`, or `None` if it was not finished."""
        path = self._path(index)
        if not path.exists():
            return None
        with _opened(path) as file:
            described = json.loads(file.metadata()["layers"])
            return {name: self._decode(name, description, file) for name, description in described.items()}

    def save_block(self, index: int, results: dict[str, LayerResult]) -> None:
        tensors: dict[str, Tensor] = {}
        described = {name: _encode(name, result, tensors) for name, result in results.items()}
        _save(self._path(index), tensors, {"layers": json.dumps(described)})

    def has_block(self, index: int) -> bool:
        return self._path(index).exists()

    def has_window(self, number: int) -> bool:
        return self._window_path(number).exists()

    def load_window(self, number: int) -> tuple[WindowState, list[float]]:
        """Return the state of the blocks that window `number` left unfinished, and its curve."""
        state: WindowState = {}
        with _opened(self._window_path(number)) as file:
            for key in file.keys():  # noqa: SIM118
                index, name, part = key.split("/")
                state.setdefault(int(index), {}).setdefault(name, {})[part] = file.get_tensor(key)
            return state, json.loads(file.metadata()["curve"])

    def save_window(self, number: int, state: WindowState, curve: list[float]) -> None:
        """Keep the training state behind window `number`."""
        tensors = {
            f"{index}/{name}/{part}": tensor.contiguous()
            for index, linears in state.items()
            for name, parts in linears.items()
            for part, tensor in parts.items()
        }
        _save(self._window_path(number), tensors, {"curve": json.dumps(curve)})

    def _path(self, index: int) -> Path:
        return self.folder / f"block-{index:05d}.safetensors"

    def _window_path(self, number: int) -> Path:
        return self.folder / f"window-{number:05d}.safetensors"

    def _decode(self, name: str, description: dict[str, Any], file: Any) -> LayerResult:
        weight = packed = None
        if description["packed"] is None:
            weight = file.get_tensor(f"{name}.weight")
        else:
            kind, plain = self._packed_types[description["packed"]["type"]], description["packed"]["plain"]
            fields = {field.name for field in dataclasses.fields(kind)} - plain.keys()
            packed = kind(**plain, **{field: file.get_tensor(f"{name}.{field}") for field in fields})
        return LayerResult(weight, packed, description["note"], description["metrics"])


def _encode(name: str, result: LayerResult, tensors: dict[str, Tensor]) -> dict[str, Any]:
    description: dict[str, Any] = {"note": result.note, "metrics": result.metrics, "packed": None}
    if result.packed is None:
        tensors[f"{name}.weight"] = result.weight.contiguous()
    else:
        values = {field.name: getattr(result.packed, field.name) for field in dataclasses.fields(result.packed)}
        parts = {field: value for field, value in values.items() if isinstance(value, Tensor)}
        tensors |= {f"{name}.{field}": value.contiguous() for field, value in parts.items()}
        plain = {field: value for field, value in values.items() if field not in parts}
        description["packed"] = {"type": type(result.packed).__name__, "plain": plain}
    return description


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise OSError(f"{path} is truncated or damaged ({error}). Delete it; it is computed again.") from error


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary, metadata=metadata)
    os.replace(temporary, path)


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
