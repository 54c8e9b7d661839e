"""What an export wrote, and how far it is from the model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExportReport:
    """What `export_gguf` and `export_gptq` return.

    Args:
        path (`str`): the file or folder written.
        format (`str`): its format.
        file_bytes (`int`): its size.
        relative_error (`dict[str, float]`): of each packed weight by name, the norm of what the file differs by over
            the norm of the weight. Rounding scales to fp16 gives at most 2^-11, 4.9e-4.
        lossy (`tuple[str, ...]`): the weights whose scales the format cannot hold one by one.
    """

    path: str
    format: str
    file_bytes: int
    relative_error: dict[str, float]
    lossy: tuple[str, ...] = ()

    @property
    def largest_error(self) -> float:
        return max(self.relative_error.values())

    def __str__(self) -> str:
        worst = max(self.relative_error, key=self.relative_error.__getitem__)
        lines = [
            f"{self.format}: {len(self.relative_error)} packed weights, {self.file_bytes / 1e6:.1f} MB at {self.path}",
            f"largest relative error of a weight: {self.largest_error:.2e} ({worst})",
        ]
        if self.lossy:
            lines.append(f"{len(self.lossy)} weights share scales that were apart: what they lost is in that error")
        return "\n".join(lines)


def relative_error(stored: Tensor, exact: Tensor, squares: Tensor) -> float:
    """Return the relative error of a weight whose scales differ: the root of `sum(squares (stored - exact)^2)` over
    that of `sum(squares exact^2)`, and 0 for a weight of zeros.

    Args:
        stored (`torch.Tensor`): the scales written.
        exact (`torch.Tensor`): the scales of the model.
        squares (`torch.Tensor`): the sum of `(code - zero)^2` of the columns that have the scale.
    """
    stored, exact, squares = stored.double(), exact.double(), squares.double()
    total = (squares * exact**2).sum()
    return float(((squares * (stored - exact) ** 2).sum() / total).sqrt()) if total > 0 else 0.0
