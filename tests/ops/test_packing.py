import pytest
import torch

from hf_ext.ops.packing import pack_codes, packed_rows, unpack_codes
from tests.numerics import assert_matches


BITS = (1, 2, 3, 4, 8)


def random_codes(rows: int, columns: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns * 10 + bits)
    return torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", [1, 3, 7, 8, 9, 31, 64, 65])
def test_unpacking_gives_the_codes_back(bits, columns):
    for rows in range(1, 10):
        codes = random_codes(rows, columns, bits)
        before = codes.clone()
        packed = pack_codes(codes, bits)
        packed_before = packed.clone()
        assert_matches(unpack_codes(packed, bits, columns), codes, "exact")
        assert_matches(codes, before, "exact")
        assert_matches(packed, packed_before, "exact")


@pytest.mark.parametrize(
    ("bits", "codes", "expected"),
    [
        (1, [1, 0, 0, 1, 0, 0, 0, 0, 1], [0b00001001, 1]),
        (2, [0, 1, 2, 1], [0b01100100, 0]),
        (3, [1, 2, 3, 4, 5, 6, 7, 0], [0b11010001, 0b01011000, 0b00011111]),
        (4, [1, 2, 15], [0x21, 0x0F, 0, 0]),
        (8, [0, 128, 255], [0, 128, 255, 0, 0, 0, 0, 0]),
    ],
)
def test_bytes_are_as_documented(bits, codes, expected):
    packed = pack_codes(torch.tensor([codes], dtype=torch.uint8), bits)
    assert_matches(packed, torch.tensor([expected], dtype=torch.uint8).t(), "exact")


@pytest.mark.parametrize("bits", BITS)
def test_every_bit_is_used(bits):
    packed = pack_codes(random_codes(5, 4096, bits), bits)
    assert packed.nbytes * 8 == 5 * 4096 * bits
    assert packed_rows(4096, bits) == packed.shape[0]
    full = pack_codes(torch.full((1, 16), 2**bits - 1, dtype=torch.uint8), bits)
    assert_matches(full, torch.full_like(full, 255), "exact")


def test_non_contiguous_codes_pack_as_their_copy():
    codes = random_codes(24, 6, 3).t()
    assert_matches(pack_codes(codes, 3), pack_codes(codes.contiguous(), 3), "exact")


def test_no_rows_pack_and_unpack():
    codes = torch.empty(0, 9, dtype=torch.uint8)
    assert_matches(unpack_codes(pack_codes(codes, 3), 3, 9), codes, "exact")


def test_errors_name_the_value():
    with pytest.raises(ValueError, match="bits is 5"):
        packed_rows(8, 5)
    with pytest.raises(ValueError, match="codes hold 9; 3 bits"):
        pack_codes(torch.tensor([[9]], dtype=torch.uint8), 3)
    with pytest.raises(ValueError, match="torch.int64"):
        pack_codes(torch.zeros(1, 8, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match="take 4"):
        unpack_codes(torch.zeros(3, 1, dtype=torch.uint8), 4, 8)
