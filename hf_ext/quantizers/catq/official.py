"""Factors and LoRA that the released code of CAT-Q trained, read from its parameters file and made ternary here."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.fingerprint import tensor_digest
from ...ops.packed_weight import PackedWeight
from ..blockwise import LayerResult
from .config import CatQConfig
from .method import TernaryStandIn, ternary_result


MANIFEST = "parameters_per_layer_v1"
# Ours -> the released code's, behind the name of a linear.
FACTORS = {
    "mean_factor": "weight_quantizer.generate_mu_factor.bound_factor",
    "scale_factor": "weight_quantizer.generate_scale_factor.bound_factor",
    "threshold_factor": "weight_quantizer.generate_round_factor.bound_factor",
}
LORA = {"lora_A": "lora_A.0", "lora_B": "lora_B.0"}


class OfficialParameters:
    """A closed-form method: every linear with the factors and the LoRA of `config.parameters`.

    Raises:
        OSError, ValueError: a file that is absent, damaged or of another form; nothing was changed.
    """

    name = "CAT-Q parameters"
    needs_inputs = False
    propagate_error = False
    packed_types = (PackedWeight,)

    def __init__(self, config: CatQConfig):
        self.config = config
        self.path = config.parameters
        self.layers = read_parameters(config.parameters)
        tensors = [tensor for index in sorted(self.layers) for _, tensor in sorted(self.layers[index].items())]
        self.identity = {"parameters": tensor_digest(tensors)}

    def check_shapes(self, shapes: dict[str, tuple[int, int]]) -> None:
        """Raise `ValueError` for linears, `{name: (out_features, in_features)}`, that the file does not fit."""
        for name, (out_features, in_features) in shapes.items():
            index, held = self._held(name)
            groups = 1 if self.config.group_size == -1 else in_features // self.config.group_size
            for key in FACTORS:
                if key not in held or held[key].numel() != out_features * groups:
                    found = f"has {held[key].numel()} values" if key in held else "is absent"
                    raise ValueError(
                        f"{FACTORS[key]} of {name} (layer {index}) {found} in {self.path}, and with "
                        f"group_size={self.config.group_size} it takes {out_features * groups}. Give the model and "
                        "the group_size that the parameters were trained with."
                    )
            if LORA.keys() & held.keys():
                rank = held["lora_A"].shape[0] if "lora_A" in held else 0
                expected = {"lora_A": (rank, in_features), "lora_B": (out_features, rank)}
                found = {key: tuple(held[key].shape) if key in held else None for key in LORA}
                if found != expected:
                    raise ValueError(
                        f"The LoRA of {name} (layer {index}) has shapes {found} in {self.path}; a linear of "
                        f"{out_features} x {in_features} takes lora_A (rank, {in_features}) and "
                        f"lora_B ({out_features}, rank). Give the model that the parameters were trained with."
                    )

    def solve(self, group: str, linears: dict[str, nn.Module]) -> dict[str, LayerResult]:
        return {name: self._solve_linear(name, linear) for name, linear in linears.items()}

    def _solve_linear(self, name: str, linear: nn.Module) -> LayerResult:
        stand_in = TernaryStandIn(linear, self.config, torch.Generator())  # without a LoRA, its B is 0
        for key, tensor in self._held(name)[1].items():
            given = tensor.to(linear.weight.device, torch.float32)
            shape = getattr(stand_in, key).shape if key in FACTORS else given.shape
            setattr(stand_in, key, nn.Parameter(given.view(shape)))
        return ternary_result(stand_in)

    def _held(self, name: str) -> tuple[int, dict[str, Tensor]]:
        """The layer of the linear `name`, and what the file holds for it, by our names."""
        parts = name.split(".")
        place = next(place for place, part in enumerate(parts) if part.isdigit())
        held, inner = self.layers.get(int(parts[place]), {}), ".".join(parts[place + 1 :])
        keys = {ours: f"{inner}.{official}" for ours, official in (FACTORS | LORA).items()}
        return int(parts[place]), {ours: held[key] for ours, key in keys.items() if key in held}


def read_parameters(path: str | os.PathLike) -> dict[int, dict[str, Tensor]]:
    """Return `{layer: {name: tensor}}` of a released parameters file, or of a manifest of one file a layer.

    Raises:
        OSError: no such file, or none that `torch.load` reads without running code. ValueError: of another form.
    """
    path = Path(path)
    found = _load(path)
    layers = found.get("layers") if isinstance(found, dict) and found.get("__format__") == MANIFEST else found
    if not isinstance(layers, dict) or not all(str(index).isdigit() for index in layers):
        raise ValueError(f"{path} does not hold the parameters of every layer by its number, nor a manifest of such.")
    if layers is found:
        return {int(index): tensors for index, tensors in layers.items()}
    folder = path.parent.resolve()
    for index, relative in layers.items():
        if not (folder / relative).resolve().is_relative_to(folder):
            raise ValueError(f"{path}: layer {index} lies at {relative!r}, outside the folder of the manifest.")
    return {int(index): _load(folder / relative) for index, relative in layers.items()}


def _load(path: Path) -> Any:
    if not path.is_file():
        raise OSError(f"parameters={str(path)!r}: no such file.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise OSError(f"{path} is damaged, or holds more than tensors ({reason}).") from error
