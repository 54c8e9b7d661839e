"""Finished blocks of a quantization run on disk, so that a killed run goes on where it stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..ops.low_bit_linear import PackedWeight
from .blockwise import LayerResult


IDENTITY = "run.json"


class RunCheckpoint:
    """A folder of finished blocks. A file appears only when it is whole: it is written beside and renamed.

    Args:
        folder: where to keep them; made if absent.
        identity: what must be the same for a block to be taken: model, calibration data and options.

    Raises:
        ValueError: if the folder holds another run; the message says what differs.
    """

    def __init__(self, folder: str | os.PathLike, identity: dict[str, Any]):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / IDENTITY
        identity = json.loads(json.dumps(identity))
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
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
        try:
            return self._read(path)
        except SafetensorError as error:
            raise OSError(
                f"{path} is truncated or damaged ({error}). Delete it; its block is computed again."
            ) from error

    def _read(self, path: Path) -> dict[str, LayerResult]:
        with safe_open(path, framework="pt") as file:
            described = json.loads(file.metadata()["layers"])
            return {name: _decode(name, description, file) for name, description in described.items()}

    def save_block(self, index: int, results: dict[str, LayerResult]) -> None:
        tensors: dict[str, Tensor] = {}
        described = {name: _encode(name, result, tensors) for name, result in results.items()}
        path = self._path(index)
        temporary = path.with_suffix(".partial")
        save_file(tensors, temporary, metadata={"layers": json.dumps(described)})
        os.replace(temporary, path)

    def _path(self, index: int) -> Path:
        return self.folder / f"block-{index:05d}.safetensors"


def _encode(name: str, result: LayerResult, tensors: dict[str, Tensor]) -> dict[str, Any]:
    description: dict[str, Any] = {"note": result.note, "metrics": result.metrics, "packed": None}
    if result.packed is None:
        tensors[f"{name}.weight"] = result.weight.contiguous()
    else:
        packed = result.packed
        tensors |= {f"{name}.codes": packed.codes, f"{name}.scale": packed.scale, f"{name}.zero": packed.zero}
        description["packed"] = {
            "bits": packed.bits,
            "in_features": packed.in_features,
            "group_size": packed.group_size,
        }
    return description


def _decode(name: str, description: dict[str, Any], file: Any) -> LayerResult:
    if description["packed"] is None:
        weight, packed = file.get_tensor(f"{name}.weight"), None
    else:
        parts = {part: file.get_tensor(f"{name}.{part}") for part in ("codes", "scale", "zero")}
        weight, packed = None, PackedWeight(**parts, **description["packed"])
    return LayerResult(weight, packed, description["note"], description["metrics"])


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
