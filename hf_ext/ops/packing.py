"""Codes of 1, 2, 3, 4 or 8 bits packed in bytes, without a wasted bit."""

import math

import torch
import torch.nn.functional as F


BITS = (1, 2, 3, 4, 8)

# Columns are padded to whole units of every width, so that a column of codes is as long whatever the bits.
COLUMN_MULTIPLE = 8


def packed_rows(in_features: int, bits: int) -> int:
    """Bytes that `in_features` codes of one output take at `bits` bits: `bits` bytes for every 8 inputs begun."""
    _check_bits(bits)
    return -(-in_features // COLUMN_MULTIPLE) * bits


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integer codes along the last axis, and put the outputs in the last axis.

    The bytes of one output are one stream of bits, lowest bit first: input `k` has the bits from `k * bits` to
    `(k + 1) * bits - 1`, so that a 3-bit code may begin in one byte and end in the next. Inputs are padded with code 0
    to a multiple of 8. The same byte of all outputs is contiguous: unpacking then runs over long contiguous rows, with
    one shift for a whole row.

    Args:
        codes (`torch.Tensor` of shape `(out_features, in_features)`): uint8, each in `[0, 2**bits - 1]`.
        bits (`int`): 1, 2, 3, 4 or 8.

    Returns:
        `torch.Tensor` of shape `(packed_rows(in_features, bits), out_features)`: uint8.

    Raises:
        ValueError: `bits` is not supported, or `codes` is not a uint8 matrix of codes that fit in `bits`.
    """
    _check_bits(bits)
    if codes.dtype != torch.uint8 or codes.dim() != 2:
        raise ValueError(f"codes are {codes.dtype} of {codes.dim()} dimensions; pass a torch.uint8 matrix.")
    if bits < 8 and codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"codes hold {int(codes.max())}; {bits} bits hold 0 to {2**bits - 1}. Clamp codes first.")
    codes_per_unit, unit = unit_of(bits)
    codes = F.pad(codes, (0, -codes.shape[1] % COLUMN_MULTIPLE)).t().unflatten(0, (-1, codes_per_unit))
    packed = codes.new_zeros(codes.shape[0], unit, codes.shape[2])
    for place in range(codes_per_unit):
        byte, shift = divmod(place * bits, 8)
        packed[:, byte] |= codes[:, place] << shift
        if shift + bits > 8:
            packed[:, byte + 1] |= codes[:, place] >> (8 - shift)
    return packed.flatten(0, 1)


def unpack_codes(packed: torch.Tensor, bits: int, in_features: int) -> torch.Tensor:
    """The codes that [`pack_codes`] packed: uint8 of shape `(out_features, in_features)`.

    Raises:
        ValueError: `bits` is not supported, or `packed` is not as long as `in_features` codes at `bits` bits.
    """
    expected = packed_rows(in_features, bits)
    if packed.shape[0] != expected:
        raise ValueError(
            f"packed has {packed.shape[0]} rows; {in_features} codes of {bits} bits take {expected}. "
            "Check bits and in_features against the ones given to pack_codes."
        )
    codes_per_unit, unit = unit_of(bits)
    units = packed.unflatten(0, (-1, unit))
    codes = torch.empty(units.shape[0], codes_per_unit, packed.shape[1], dtype=torch.uint8, device=packed.device)
    unpack_units(units, bits, codes)
    return codes.flatten(0, 1)[:in_features].t().contiguous()


def unit_of(bits: int) -> tuple[int, int]:
    """The codes and the bytes of the shortest run of whole bytes that holds whole codes."""
    shared = math.gcd(bits, 8)
    return 8 // shared, bits // shared


def unpack_units(packed: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Unpack units ([`unit_of`]) of bytes, `(..., bytes, outputs)`, into units of codes, `(..., codes, outputs)`."""
    mask = 2**bits - 1
    for place in range(out.shape[-2]):
        byte, shift = divmod(place * bits, 8)
        first, codes = packed[..., byte, :], out[..., place, :]
        if shift == 0:
            torch.bitwise_and(first, mask, out=codes)
            continue
        torch.bitwise_right_shift(first, shift, out=codes)
        if shift + bits > 8:
            codes.bitwise_or_(packed[..., byte + 1, :] << (8 - shift))
        if shift + bits != 8:
            codes.bitwise_and_(mask)


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits is {bits!r}; codes pack at 1, 2, 3, 4 or 8 bits.")
