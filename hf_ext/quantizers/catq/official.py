"""Factors and LoRA that the released code of CAT-Q trained, read from its parameters file and made ternary here."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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

    def solve(self, group: str, linears: dict[str, nn.Module]) -> dict[str, LayerResult]:
        return {name: self._solve_linear(name, linear) for name, linear in linears.items()}

    def _solve_linear(self, name: str, linear: nn.Module) -> LayerResult:
        index, inner = next((int(part), rest) for part, rest in _splits(name) if part.isdigit())
        held = self.layers.get(index, {})
        stand_in = TernaryStandIn(linear, self.config, torch.Generator())
        for ours, official in FACTORS.items():
            key = f"{inner}.{official}"
            expected = getattr(stand_in, ours)
            if key not in held or held[key].numel() != expected.numel():
                found = f"has {held[key].numel()} values" if key in held else "is absent"
                raise ValueError(
                    f"{key} of layer {index} {found} in {self.path}, and {name} with "
                    f"group_size={self.config.group_size} takes {expected.numel()}. Give the model and the group_size "
                    "that the parameters were trained with."
                )
            setattr(stand_in, ours, nn.Parameter(held[key].float().view(expected.shape)))
        keys = {ours: f"{inner}.{official}" for ours, official in LORA.items()}
        if keys["lora_A"] in held:
            for ours, key in keys.items():
                setattr(stand_in, ours, nn.Parameter(held[key].float()))
        else:
            stand_in.lora_B = nn.Parameter(torch.zeros_like(stand_in.lora_B))
        return ternary_result(stand_in)


def read_parameters(path: str | os.PathLike) -> dict[int, dict[str, Tensor]]:
    """Return `{layer: {name: tensor}}` of a released parameters file, or of a manifest of one file a layer.

    Raises:
        OSError: no such file, or none that `torch.load` reads without running code. ValueError: of another form.
    """
    path = Path(path)
    found = _load(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; expected the parameters of every layer by number.")
    if found.get("__format__") != MANIFEST:
        return {int(index): tensors for index, tensors in found.items()}
    folder = path.parent.resolve()
    layers = {}
    for index, relative in found["layers"].items():
        part = (folder / relative).resolve()
        if not part.is_relative_to(folder):
            raise ValueError(f"{path}: layer {index} lies at {relative!r}, outside the folder of the manifest.")
        layers[int(index)] = _load(part)
    return layers


def _load(path: Path) -> Any:
    if not path.is_file():
        raise OSError(f"parameters={str(path)!r}: no such file.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise OSError(f"{path} is damaged, or holds more than tensors ({reason}).") from error


def _splits(name: str) -> list[tuple[str, str]]:
    """Every part of a dotted name with what follows it."""
    parts = name.split(".")
    return [(part, ".".join(parts[place + 1 :])) for place, part in enumerate(parts)]
