"""What a quantization run did to every layer: the object that `quantize` returns, printable and plottable."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.errors import MissingExtraError


if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class LayerReport:
    """One linear: `status` is `"quantized"`, `"absorbed"` or `"skipped"`, `note` says why, or what went wrong."""

    name: str
    status: str
    shape: tuple[int, int]
    note: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class QuantizationReport:
    """Every linear of a model with what was done to it and what that cost.

    Args:
        method (`str`): the method's name.
        layers (`list[LayerReport]`): one entry a linear, skipped ones included.
        seconds (`float`): wall-clock time of the run.
        calibration_tokens (`int`): tokens that went through the model.
        curves (`list[list[float]]`): of a trained method: the loss of every window after each epoch.
    """

    method: str
    layers: list[LayerReport] = field(default_factory=list)
    seconds: float = 0.0
    calibration_tokens: int = 0
    curves: list[list[float]] = field(default_factory=list)

    def count(self, status: str) -> int:
        return sum(layer.status == status for layer in self.layers)

    def notes(self) -> dict[str, list[str]]:
        """Return every note of a layer that was not skipped, with the names of the layers that carry it."""
        found: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.note and layer.status != "skipped":
                found.setdefault(layer.note, []).append(layer.name)
        return found

    def metric_names(self) -> list[str]:
        return list(dict.fromkeys(name for layer in self.layers for name in layer.metrics))

    def bits_per_weight(self) -> float | None:
        """Return the mean over all changed weights, where the method reports it for its linears."""
        found = [
            (math.prod(layer.shape), layer.metrics.get("bits_per_weight")) for layer in self.layers if layer.metrics
        ]
        if not found or any(bits is None for _, bits in found):
            return None
        return sum(weights * bits for weights, bits in found) / sum(weights for weights, _ in found)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: str | os.PathLike) -> None:
        """Write the report as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=1)

    def summary(self) -> str:
        done = [layer for layer in self.layers if layer.status != "skipped"]
        status = done[0].status if done else "changed"
        parts = [f"{len(done)} linears {status}", f"{self.count('skipped')} skipped"]
        if self.bits_per_weight() is not None:
            parts.append(f"{self.bits_per_weight():.3g} bits a weight")
        if self.calibration_tokens:
            parts.append(f"{self.calibration_tokens} calibration tokens")
        return f"{self.method}: {', '.join(parts)}, {self.seconds:.0f} s"

    def __str__(self) -> str:
        names = self.metric_names()
        rows = [["layer", "shape", "status", *names, "note"]]
        for layer in self.layers:
            values = [f"{layer.metrics[name]:.4g}" if name in layer.metrics else "" for name in names]
            rows.append([layer.name, "x".join(map(str, layer.shape)), layer.status, *values, layer.note])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        return "\n".join([self.summary(), *lines])

    def plot(self) -> Figure:
        """Draw every metric over the layers, in the order of the model, and the losses of a trained method.

        Returns:
            `matplotlib.figure.Figure`: one panel a metric, and one for the losses.

        Raises:
            ImportError: without the `viz` extra.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError("matplotlib", "viz", "QuantizationReport.plot") from error
        names = self.metric_names()
        panels = max(1, len(names) + bool(self.curves))
        figure = Figure(figsize=(9, 2.4 * panels), layout="constrained")
        panel = figure.subplots(panels, squeeze=False)[:, 0]
        for number, curve in enumerate(self.curves):
            panel[-1].plot(curve, linewidth=0.8, color=f"{0.8 * number / len(self.curves):.3f}")
            panel[-1].set(xlabel="epoch, then the end", ylabel="loss, dark to light", yscale="log")
        for axes, name in zip(panel, names, strict=False):
            kinds: dict[str, tuple[list[int], list[float]]] = {}
            for i, layer in enumerate(self.layers):
                if name in layer.metrics:
                    at, values = kinds.setdefault(layer.name.rpartition(".")[2], ([], []))
                    at.append(i)
                    values.append(layer.metrics[name])
            for kind, (at, values) in kinds.items():
                axes.plot(at, values, marker=".", linewidth=0.8, label=kind)
            axes.set_ylabel(name.replace("_", " "))
            axes.legend(fontsize="x-small", ncols=4)
            axes.set_xlabel("linear, in the order of the model")
        figure.suptitle(self.summary())
        return figure
