"""A weight matrix of packed codes, and the reference that gives its values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_ext.ops.packing import COLUMN_MULTIPLE, packed_rows, unpack_codes


@dataclass(frozen=True)
class PackedWeight:
    """A weight matrix as codes on per-group integer grids: `weight = (code - zero) * scale`.

    Args:
        codes (`torch.Tensor` of shape `(packed_rows, out_features)`): uint8, from [`~ops.packing.pack_codes`].
        scale (`torch.Tensor` of shape `(out_features, groups)`): float32.
        zero (`torch.Tensor` of shape `(out_features, groups)`): uint8, each in `[0, 2**bits - 1]`.
        bits (`int`): 2, 3, 4 or 8.
        in_features (`int`): columns of the weight.
        group_size (`int`): inputs that share a scale and a zero; the last group may be shorter. -1 is a whole row.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    bits: int
    in_features: int
    group_size: int = -1

    def __post_init__(self) -> None:
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}; pass a positive size, or -1 for whole rows.")
        rows, columns = packed_rows(self.in_features, self.bits), self.codes.shape[1]
        expected = {"codes": (rows, columns), "scale": (columns, self.groups), "zero": (columns, self.groups)}
        for name, shape in expected.items():
            if tuple(getattr(self, name).shape) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(getattr(self, name).shape)}; {self.in_features} inputs at "
                    f"{self.bits} bits with group_size={self.group_size} take {shape}."
                )

    @property
    def out_features(self) -> int:
        return self.codes.shape[1]

    @property
    def groups(self) -> int:
        return 1 if self.group_size == -1 else max(1, -(-self.in_features // self.group_size))

    @property
    def columns_per_group(self) -> int:
        """`group_size`, or all columns where a row is one group."""
        return self.in_features if self.groups == 1 else self.group_size

    @property
    def groups_are_whole_units(self) -> bool:
        """Whether no unit of packed bytes holds codes of two groups."""
        return self.groups == 1 or self.group_size % COLUMN_MULTIPLE == 0

    def per_column(self, per_group: torch.Tensor) -> torch.Tensor:
        """One value a column of the weight, from one value a group."""
        if self.groups == 1:
            return per_group
        return per_group.repeat_interleave(self.group_size, dim=1)[:, : self.in_features]


def dequantize(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight as floats, `(code - zero) * scale` in float32 and then cast.

    This is the reference that every other path is tested against.

    Args:
        weight ([`PackedWeight`]): the weight.
        dtype (`torch.dtype`, defaults to `torch.float32`): of the result.

    Returns:
        `torch.Tensor` of shape `(out_features, in_features)`.
    """
    codes = unpack_codes(weight.codes, weight.bits, weight.in_features).float()
    return codes.sub_(weight.per_column(weight.zero.float())).mul_(weight.per_column(weight.scale)).to(dtype)
