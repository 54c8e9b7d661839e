"""Blocks hold the codes and scales that went in, as the formats' own readers see them."""

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from hf_ext.quantizers.export.blocks import FORMATS, encode_rows


TQ = ("tq1_0", "tq2_0")
Q2_0 = ("q2_0", "pq2_0", "q2_0_g64")
ROWS, COLUMNS = 6, 1024


def decode_q2_0(data: bytes, columns: int) -> list[float]:
    """From the layout: an fp16 scale, then `columns / 4` bytes, value `j` at byte `j // 4`, bits `2 * (j % 4)`."""
    values, size = [], 2 + columns // 4
    for start in range(0, len(data), size):
        scale = float(np.frombuffer(data[start : start + 2], dtype="<f2")[0])
        for j in range(columns):
            code = data[start + 2 + j // 4] >> 2 * (j % 4) & 3
            values.append((code - 1) * scale)
    return values


def drawn(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and the weight they stand for. The scales are of both signs, of any size, and 0."""
    generator = np.random.default_rng(0)
    size = FORMATS[name].block_size
    codes = generator.integers(0, 3, (ROWS, COLUMNS), dtype=np.uint8)
    scales = generator.standard_normal((ROWS, COLUMNS // size)) * 10.0 ** generator.integers(-7, 4, (ROWS, 1))
    scales[0, 0] = 0
    scales = scales.astype(np.float16)
    return codes, scales, (codes.astype(np.float32) - 1) * scales.astype(np.float32).repeat(size, axis=1)


@pytest.mark.parametrize("name", TQ)
def test_oracle_6_tq_blocks_are_read_exactly_by_gguf(name):
    codes, scales, weight = drawn(name)
    kind = gguf.GGMLQuantizationType(FORMATS[name].type_id)
    assert kind.name == FORMATS[name].name
    np.testing.assert_array_equal(dequantize(encode_rows(codes, scales, FORMATS[name]), kind), weight)


@pytest.mark.parametrize("name", TQ)
def test_tq_bytes_are_those_of_ggufs_own_quantizer(name):
    """Which takes the largest value of a block for its scale: the same where the scale is positive."""
    codes, scales, _ = drawn(name)
    scales = np.abs(scales) + np.float16(0.5)
    weight = (codes.astype(np.float32) - 1) * scales.astype(np.float32).repeat(256, axis=1)
    expected = quantize(weight, gguf.GGMLQuantizationType(FORMATS[name].type_id))
    np.testing.assert_array_equal(encode_rows(codes, scales, FORMATS[name]), expected)


@pytest.mark.parametrize("name", Q2_0)
def test_q2_0_blocks_are_read_exactly(name):
    codes, scales, weight = drawn(name)
    encoded = encode_rows(codes, scales, FORMATS[name])
    for row in range(ROWS):
        assert decode_q2_0(encoded[row].tobytes(), FORMATS[name].block_size) == weight[row].tolist()


@pytest.mark.parametrize("name", Q2_0)
def test_oracle_6_q2_0_bytes(name):
    size = FORMATS[name].block_size
    codes = np.ones((1, size), dtype=np.uint8)
    assert encode_rows(codes, np.ones((1, 1), np.float16), FORMATS[name]).tobytes() == b"\x00\x3c" + b"\x55" * (
        size // 4
    )
    codes[0, :4] = [0, 1, 2, 1]
    assert encode_rows(codes, np.ones((1, 1), np.float16), FORMATS[name])[0, 2] == 0b01100100


@pytest.mark.parametrize("name", FORMATS)
def test_size_is_the_one_declared(name):
    block_format = FORMATS[name]
    codes, scales, _ = drawn(name)
    encoded = encode_rows(codes, scales, block_format)
    assert encoded.dtype == np.uint8
    assert encoded.shape == (ROWS, COLUMNS // block_format.block_size * block_format.block_bytes)
    if name in TQ:
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(block_format.type_id)]
        assert sizes == (block_format.block_size, block_format.block_bytes)
        assert gguf.LlamaFileType[f"MOSTLY_{block_format.name}"] == block_format.file_type
