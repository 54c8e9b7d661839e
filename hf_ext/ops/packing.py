"""Codes of 2, 3, 4 or 8 bits packed in bytes, without a wasted bit."""

import torch
import torch.nn.functional as F


# Codes in one unit of each layout: a byte holds 8 // bits codes; the two planes of 3 bits meet again after 8 codes.
CODES_PER_UNIT = {2: 4, 3: 8, 4: 2, 8: 1}

# Rows are padded to whole units of every layout, so that a row is as long in codes whatever the bits.
COLUMN_MULTIPLE = 8


def packed_columns(in_features: int, bits: int) -> int:
    """Bytes that one row of `in_features` codes takes at `bits` bits: `bits` bytes for every 8 columns begun."""
    _check_bits(bits)
    return -(-in_features // COLUMN_MULTIPLE) * bits


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integer codes along the last axis.

    Columns are padded with code 0 to a multiple of 8. At 2, 4 and 8 bits the first code takes a byte's lowest bits. At
    3 bits a row is two planes one after the other: the low two bits of its codes packed as 2-bit codes, then their
    third bits, the first in a byte's lowest bit.

    Args:
        codes (`torch.Tensor` of shape `(out_features, in_features)`): uint8, each in `[0, 2**bits - 1]`.
        bits (`int`): 2, 3, 4 or 8.

    Returns:
        `torch.Tensor` of shape `(out_features, packed_columns(in_features, bits))`: uint8.

    Raises:
        ValueError: `bits` is not supported, or `codes` is not a uint8 matrix of codes that fit in `bits`.
    """
    _check_bits(bits)
    if codes.dtype != torch.uint8 or codes.dim() != 2:
        raise ValueError(f"codes are {codes.dtype} of {codes.dim()} dimensions; pass a torch.uint8 matrix.")
    if bits < 8 and codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"codes hold {int(codes.max())}; {bits} bits hold 0 to {2**bits - 1}. Clamp codes first.")
    codes = F.pad(codes, (0, -codes.shape[1] % COLUMN_MULTIPLE))
    if bits == 3:
        return torch.cat([_pack_fields(codes & 3, 2), _pack_fields(codes >> 2, 1)], dim=1)
    return _pack_fields(codes, bits)


def unpack_codes(packed: torch.Tensor, bits: int, in_features: int) -> torch.Tensor:
    """The codes that [`pack_codes`] packed: uint8 of shape `(out_features, in_features)`.

    Raises:
        ValueError: `bits` is not supported, or `packed` is not as wide as `in_features` codes at `bits` bits.
    """
    expected = packed_columns(in_features, bits)
    if packed.shape[1] != expected:
        raise ValueError(
            f"packed has {packed.shape[1]} columns; {in_features} codes of {bits} bits take {expected}. "
            "Check bits and in_features against the ones given to pack_codes."
        )
    planes = code_planes(packed, bits)
    return planes.transpose(1, 2).flatten(1)[:, :in_features].contiguous()


def code_planes(packed: torch.Tensor, bits: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Codes by their place in a unit of `p = CODES_PER_UNIT[bits]` codes: column `p * t + j` is at `[:, j, t]`.

    In this order every step runs over contiguous memory, which is what makes unpacking cheap on a CPU.

    Args:
        packed (`torch.Tensor` of shape `(out_features, packed_columns)`): uint8.
        bits (`int`): 2, 3, 4 or 8.
        out (`torch.Tensor` of shape `(out_features, p, units)`, *optional*): uint8, written in place.

    Returns:
        `torch.Tensor` of shape `(out_features, p, units)`: uint8.
    """
    rows, units = packed.shape[0], packed.shape[1] * 8 // bits // CODES_PER_UNIT[bits]
    if out is None:
        out = torch.empty(rows, CODES_PER_UNIT[bits], units, dtype=torch.uint8, device=packed.device)
    if bits == 3:
        return _three_bit_planes(packed, units, out)
    for place in range(CODES_PER_UNIT[bits]):
        torch.bitwise_right_shift(packed, bits * place, out=out[:, place])
    return out.bitwise_and_(2**bits - 1) if bits < 8 else out


def _three_bit_planes(packed: torch.Tensor, units: int, out: torch.Tensor) -> torch.Tensor:
    # one contiguous copy of each half of the low plane: strided bytes would be read one by one, four times
    low = packed[:, : 2 * units].unflatten(1, (units, 2)).movedim(2, 0).contiguous()
    high = packed[:, 2 * units :]
    third = torch.empty_like(out)
    for place in range(8):
        torch.bitwise_right_shift(low[place // 4], 2 * (place % 4), out=out[:, place])
        shift = torch.bitwise_right_shift if place >= 2 else torch.bitwise_left_shift
        shift(high, abs(place - 2), out=third[:, place])
    return out.bitwise_and_(3).bitwise_or_(third.bitwise_and_(4))


def _pack_fields(codes: torch.Tensor, bits: int) -> torch.Tensor:
    fields = codes.unflatten(1, (-1, 8 // bits))
    packed = fields[:, :, 0].clone()
    for place in range(1, 8 // bits):
        packed |= fields[:, :, place] << (bits * place)
    return packed


def _check_bits(bits: int) -> None:
    if bits not in CODES_PER_UNIT:
        raise ValueError(f"bits is {bits!r}; codes pack at 2, 3, 4 or 8 bits.")
