"""The tensor types of GGUF that hold ternary weights: codes and scales in, bytes out.

A row of a weight is cut into blocks of `block_size` columns. A block is one fp16 scale and its codes, 0, 1 or 2, and
stands for `(code - 1) * scale`. The layouts are those of llama.cpp's `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BlockFormat:
    """One tensor type of GGUF.

    Args:
        name (`str`): what llama.cpp calls it.
        type_id (`int`): the tensor type's number in the file.
        file_type (`int`): what `general.file_type` says of a file that is mostly of this type.
        block_size (`int`): columns that share a scale.
        block_bytes (`int`): bytes of a block.
        encode (`Callable`): codes `[blocks, block_size]` and scales `[blocks]` to bytes `[blocks, block_bytes]`.
    """

    name: str
    type_id: int
    file_type: int
    block_size: int
    block_bytes: int
    encode: Callable[[np.ndarray, np.ndarray], np.ndarray]


def encode_rows(codes: np.ndarray, scales: np.ndarray, block_format: BlockFormat) -> np.ndarray:
    """Return the bytes of a whole weight.

    Args:
        codes (`np.ndarray`): uint8 `[out, in]`, each 0, 1 or 2; `in` is a multiple of `block_size`.
        scales (`np.ndarray`): float16 `[out, in / block_size]`.

    Returns:
        `np.ndarray`: uint8 `[out, in / block_size * block_bytes]`.
    """
    blocks = codes.reshape(-1, block_format.block_size)
    return block_format.encode(blocks, scales.reshape(-1)).reshape(codes.shape[0], -1)


def encode_q2_0(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The scale, then four neighbouring codes a byte, the first in the lowest bits. For any block size."""
    return np.concatenate([_bytes_of(scales), _pack_fields(codes.reshape(len(codes), -1, 4))], axis=1)


def encode_tq2_0(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Two runs of 32 bytes, then the scale. Byte `m` of a run has columns `m`, `m + 32`, `m + 64` and `m + 96`."""
    fields = codes.reshape(-1, 2, 4, 32).swapaxes(2, 3)
    return np.concatenate([_pack_fields(fields).reshape(-1, 64), _bytes_of(scales)], axis=1)


def encode_tq1_0(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Five codes a byte in base 3: 32 bytes for columns 0 to 159, 16 for 160 to 239, 4 (of four codes), the scale.

    Byte `m` of a run of `n` bytes has columns `m`, `m + n`, `m + 2 n`, ..., the first as the highest digit.
    """
    runs = [
        _pack_digits(codes[:, :160].reshape(-1, 5, 32)),
        _pack_digits(codes[:, 160:240].reshape(-1, 5, 16)),
        _pack_digits(codes[:, 240:].reshape(-1, 4, 4)),
    ]
    return np.concatenate([*runs, _bytes_of(scales)], axis=1)


def _pack_fields(codes: np.ndarray) -> np.ndarray:
    """Four 2-bit codes, the last axis, to a byte, lowest bits first."""
    return codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6


def _pack_digits(codes: np.ndarray) -> np.ndarray:
    """Base-3 digits along axis 1, to a byte.

    The number out of 3^5 is stored as a fraction of 256, rounded up: the reader takes the highest digit by multiplying
    by 3 and looking at what overflows the byte, then the next.
    """
    powers = np.array([81, 27, 9, 3, 1], dtype=np.uint16)[: codes.shape[1], None]
    number = (codes * powers).sum(axis=1, dtype=np.uint16)
    return ((number * 256 + 242) // 243).astype(np.uint8)


def _bytes_of(scales: np.ndarray) -> np.ndarray:
    return scales.astype("<f2").reshape(-1, 1).view(np.uint8)


# `q2_0` and `q2_0_g64` have the same number: llama.cpp took 42 for blocks of 64 where PrismML's builds had used it for
# blocks of 128. PrismML has moved its own to 142 since.
FORMATS = {
    "q2_0": BlockFormat("Q2_0", 42, 41, 128, 34, encode_q2_0),
    "pq2_0": BlockFormat("PQ2_0", 142, 141, 128, 34, encode_q2_0),
    "q2_0_g64": BlockFormat("Q2_0", 42, 41, 64, 18, encode_q2_0),
    "tq1_0": BlockFormat("TQ1_0", 34, 36, 256, 54, encode_tq1_0),
    "tq2_0": BlockFormat("TQ2_0", 35, 37, 256, 66, encode_tq2_0),
}
