"""What every export needs to know of a model before it writes: its packed layers, and what stands in the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..low_bit_linear import LowBitLinear
from ..packed_linear import PackedLinear


if TYPE_CHECKING:
    from transformers import PreTrainedModel


FP16_MAX = torch.finfo(torch.float16).max
LISTED = 8


@dataclass
class Problems:
    """Everything that is wrong, to be told at once."""

    found: list[tuple[str, str]] = field(default_factory=list)
    ways_out: list[str] = field(default_factory=list)

    def add(self, name: str, problem: str, way_out: str) -> None:
        self.found.append((name, problem))
        if way_out not in self.ways_out:
            self.ways_out.append(way_out)

    def raise_if_any(self, headline: str) -> None:
        """Raise a `ValueError` that lists what was found and the ways out; nothing was written."""
        if not self.found:
            return
        lines = [f"  {name} {problem}" for name, problem in self.found[:LISTED]]
        if len(self.found) > LISTED:
            lines.append(f"  and {len(self.found) - LISTED} more")
        raise ValueError("\n".join([f"{headline}:", *lines, f"What helps: {'; '.join(self.ways_out)}."]))


def low_bit_linears(model: PreTrainedModel) -> dict[str, LowBitLinear]:
    """Return the layers with packed codes by name, in the order of the model.

    Raises:
        ValueError: if there is none.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LowBitLinear)}
    if not layers:
        other = next((type(module).__name__ for module in model.modules() if isinstance(module, PackedLinear)), None)
        if other is not None:
            raise ValueError(
                f"The layers of this {type(model).__name__} are {other}: LittleBit-2's factors have no place in GGUF "
                "or the GPTQ layout. Share the folder that save_pretrained writes."
            )
        raise ValueError(f"{type(model).__name__} has no LowBitLinear: quantize it first.")
    return layers


def check_whole(model: PreTrainedModel, layers: dict[str, LowBitLinear]) -> None:
    """Refuse a model that is not all in memory, or has values that no export can store.

    Raises:
        ValueError: naming the tensors.
    """
    problems = Problems()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_meta:
            problems.add(name, "is offloaded", "load the model without offloading, for example with device_map='cpu'")
        elif name not in parameters and name.rpartition(".")[0] not in layers:
            problems.add(name, "is neither a float weight nor codes of bits and scales", "export another model")
        elif name in parameters and not tensor.abs().le(FP16_MAX if tensor.dim() > 1 else torch.inf).all():
            problems.add(name, "is not finite in fp16", "look for NaN and for weights over 65504")
    problems.raise_if_any(f"{type(model).__name__} cannot be exported")
