"""The CPU paths of a low-bit linear layer: PyTorch's kernels for few rows, dequantizing by blocks for many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from hf_ext.ops.packed_weight import PackedWeight
from hf_ext.ops.packing import COLUMN_MULTIPLE, unit_of, unpack_codes, unpack_units


# The int4 kernel takes these group sizes; fewer, longer groups read fewer scales.
INT4_KERNEL_GROUP_SIZES = (256, 128, 64, 32)

# The int4 kernel takes only multiples of this many output features; ours are padded with zero rows.
INT4_KERNEL_OUT_MULTIPLE = 16

# Weights dequantized and multiplied at once: 8 MB in bfloat16. Smaller blocks call each operation more often, and
# larger ones leave the cache before the GEMM reads them.
DEQUANTIZE_BLOCK = 2**22


@dataclass(frozen=True)
class CpuWeight:
    """What PyTorch's CPU kernels read, made once from a [`PackedWeight`] by [`prepare_cpu`]; never saved.

    Args:
        backend (`str`): the kernel that it is for, "int4" or "int8".
        codes (`torch.Tensor`): the kernel's own layout.
        scale (`torch.Tensor`): bfloat16; for "int4" with the offsets, `(kernel_groups, padded_out_features, 2)`.
        row_offset (`torch.Tensor`, *optional*): "int8" only, what each row adds for every unit of input.
        group_size (`int`): the kernel's group size.
    """

    backend: str
    codes: torch.Tensor
    scale: torch.Tensor
    row_offset: torch.Tensor | None = None
    group_size: int = -1


def prepare_cpu(weight: PackedWeight) -> CpuWeight | None:
    """Copy a weight into the layout of a PyTorch CPU kernel, for fast calls with few rows.

    Widths of 2, 3 and 4 bits take the int4 kernel where `in_features` and `group_size` (or a whole row) are multiples
    of 32; 8 bits take the int8 kernel where a row is one group. The copy takes 4 or 8 bits a weight. Keep it beside
    the module, outside its state, and make it again when the codes change.

    Returns:
        [`CpuWeight`], or `None` where no kernel fits; [`why_no_cpu_kernel`] says why.
    """
    if why_no_cpu_kernel(weight) is not None:
        return None
    return _prepare_int8(weight) if weight.bits == 8 else _prepare_int4(weight)


def why_no_cpu_kernel(weight: PackedWeight) -> str | None:
    """Why [`prepare_cpu`] makes no copy of this weight; `None` where it does."""
    if weight.codes.device.type != "cpu":
        return f"the weight is on {weight.codes.device.type}"
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return "PyTorch's low-bit kernels are fast only with AVX2 or AVX512"
    if weight.bits == 8:
        return None if weight.groups == 1 else "PyTorch's int8 kernel takes one scale a row"
    if _int4_group_size(weight) is None:
        return "PyTorch's int4 kernel takes in_features and group_size in multiples of 32"
    return None


def int4_linear(rows: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, runtime: CpuWeight):
    """`rows @ weight.T + bias` by PyTorch's int4 kernel, which unpacks the weight again every 4 rows."""
    output = _int4_mm(rows.contiguous(), runtime.codes, runtime.group_size, runtime.scale)
    if output.shape[1] != weight.out_features:
        output = output[:, : weight.out_features].contiguous()
    return output if bias is None else output.add_(bias)


def int8_linear(rows: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, runtime: CpuWeight):
    """`rows @ weight.T + bias` by PyTorch's int8 kernel."""
    output = torch.ops.aten._weight_int8pack_mm.default(rows.contiguous(), runtime.codes, runtime.scale)
    # In float32: the two parts may cancel.
    output = torch.addcmul(output.float(), rows.float().sum(1, keepdim=True), runtime.row_offset)
    return (output if bias is None else output.add_(bias)).to(rows.dtype)


def dequantize_linear(rows: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, runtime=None):
    """`rows @ weight.T + bias`, a block of outputs after the other: dequantize it, then multiply."""
    rows = _to_group_order(rows, weight)
    output = rows.new_empty(rows.shape[0], weight.out_features)
    for columns, block in _dequantized_blocks(weight, rows.dtype):
        if bias is None:
            torch.mm(rows, block, out=output[:, columns])
        else:
            torch.addmm(bias[columns], rows, block, out=output[:, columns])
        del block
    return output


def dequantize_input_gradient(grad_output: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """`grad_output @ weight`, a block of outputs after the other, summed in float32 or better."""
    dtype = torch.promote_types(grad_output.dtype, torch.float32)
    total = grad_output.new_zeros(grad_output.shape[0], weight.groups * _padded_group_size(weight), dtype=dtype)
    for columns, block in _dequantized_blocks(weight, grad_output.dtype):
        total += grad_output[:, columns] @ block.t()
        del block
    return _from_group_order(total, weight).to(grad_output.dtype)


_int4_mm = torch.ops.aten._weight_int4pack_mm_for_cpu.default


def _int4_group_size(weight: PackedWeight) -> int | None:
    fits = (
        size for size in INT4_KERNEL_GROUP_SIZES if weight.in_features % size == weight.columns_per_group % size == 0
    )
    return next(fits, None)


def _prepare_int4(weight: PackedWeight) -> CpuWeight:
    # The kernel computes (code - 8) * scale + offset, with scale and offset in bfloat16, on its own, smaller groups.
    # Below 4 bits, code - zero + 8 still fits in 4 bits, so that the offset is 0 and costs no accuracy.
    group_size, codes = _int4_group_size(weight), unpack_codes(weight.codes, weight.bits, weight.in_features).int()
    offset = (8 - weight.zero.float()) * weight.scale
    if weight.bits < 4:
        codes += 8 - weight.per_column(weight.zero.int())
        offset.zero_()
    scale_and_offset = torch.stack([weight.scale, offset], dim=-1).to(torch.bfloat16)
    scale_and_offset = scale_and_offset.repeat_interleave(weight.columns_per_group // group_size, dim=1)
    padding = -weight.out_features % INT4_KERNEL_OUT_MULTIPLE
    scale_and_offset = F.pad(scale_and_offset, (0, 0, 0, 0, 0, padding)).transpose(0, 1).contiguous()
    kernel_codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(F.pad(codes, (0, 0, 0, padding)), 1)
    return CpuWeight("int4", kernel_codes, scale_and_offset, group_size=group_size)


def _prepare_int8(weight: PackedWeight) -> CpuWeight:
    # The kernel computes code * scale with signed codes: shift ours by 128, and leave the rest to a row sum.
    codes = (unpack_codes(weight.codes, 8, weight.in_features) ^ 128).view(torch.int8)
    row_offset = (128 - weight.zero.float()) * weight.scale
    return CpuWeight("int8", codes, weight.scale[:, 0].to(torch.bfloat16), row_offset=row_offset[:, 0])


def _padded_group_size(weight: PackedWeight) -> int:
    return -(-weight.columns_per_group // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def _to_group_order(rows: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    # Blocks hold input `k` of every group side by side: one set of scales then serves a whole row of a block.
    size, groups = _padded_group_size(weight), weight.groups
    padding = groups * size - weight.in_features
    if padding:
        rows = F.pad(rows, (0, padding))
    return rows.unflatten(1, (groups, size)).transpose(1, 2).reshape(rows.shape[0], -1)


def _from_group_order(rows: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    rows = rows.unflatten(1, (_padded_group_size(weight), weight.groups)).transpose(1, 2)
    return rows.flatten(1)[:, : weight.in_features]


def _dequantized_blocks(weight: PackedWeight, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of the outputs, each with its weights: `(inputs, outputs)`, inputs in group order.

    Delete a block before asking for the next, which then takes the same memory: fresh memory costs more than filling.
    """
    size, groups = _padded_group_size(weight), weight.groups
    codes_per_unit, unit = unit_of(weight.bits)
    packed, padding = weight.codes, groups * (size // codes_per_unit * unit) - weight.codes.shape[0]
    if padding:
        packed = F.pad(packed, (0, 0, 0, padding))
    packed = packed.unflatten(0, (groups, -1, unit))
    step = min(weight.out_features, max(1, DEQUANTIZE_BLOCK // (size * groups)))
    scale_codes = _scale_codes_onednn if dtype is torch.bfloat16 and _onednn_is_fast() else _scale_codes
    # glibc gives freed blocks back to the system, to be mapped again page by page, until it has seen something larger
    # come and go. This touches no page.
    torch.empty(4 * DEQUANTIZE_BLOCK, dtype=torch.uint8)
    buffer = torch.empty(size * groups * step, dtype=torch.uint8)
    for start in range(0, weight.out_features, step):
        columns = slice(start, min(start + step, weight.out_features))
        channels = groups * (columns.stop - start)
        codes = buffer[: size * channels].view(size, channels)
        units = codes.view(-1, codes_per_unit, groups, columns.stop - start)
        unpack_units(packed[..., columns], weight.bits, units.permute(2, 0, 1, 3))
        scale, zero = (part[columns].t().reshape(channels) for part in (weight.scale, weight.zero))
        yield columns, scale_codes(codes, scale, zero, dtype).view(size * groups, -1)


def _scale_codes(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.float().sub_(zero).mul_(scale).to(dtype)


def _onednn_is_fast() -> bool:
    return torch.backends.mkldnn.is_available() and torch.cpu.get_capabilities().get("avx512_vnni", False)


def _scale_codes_onednn(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    # To oneDNN this is a quantized depthwise convolution by ones, whose scales are ours and whose float32 bias is what
    # the zeros take away: one pass from uint8 to bfloat16 that rounds in one instruction. PyTorch's own operations
    # take three passes, and ten instructions to round.
    channels = codes.shape[1]
    values = torch.ops.onednn.qconv2d_pointwise.default(
        codes[None, None].permute(0, 3, 1, 2),
        *(1.0, 0),  # the codes' own scale and zero
        _ones_kernel(channels),
        scale,
        torch.zeros(1, dtype=torch.int64),
        (zero * scale).neg_(),
        *([1, 1], [0, 0], [1, 1], channels),  # stride, padding, dilation, convolution groups
        *(1.0, 0, dtype),  # the result's scale, zero and dtype
        *("none", [], ""),  # nothing after the convolution
    )
    return values.permute(0, 2, 3, 1)[0, 0]


@lru_cache(maxsize=32)
def _ones_kernel(channels: int) -> torch.Tensor:
    ones = torch.ones(channels, 1, 1, 1, dtype=torch.int8)
    return torch.ops.onednn.qconv_prepack(ones, torch.ones(1), 1.0, 0, [1, 1], [0, 0], [1, 1], channels)
