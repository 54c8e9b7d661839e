"""A linear layer over packed 2, 3, 4 or 8-bit weights: the reference, the CPU paths, and the choice between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_ext.ops.packing import CODES_PER_UNIT, COLUMN_MULTIPLE, code_planes, packed_columns, unpack_codes


# The int4 kernel unpacks the weight again every 4 rows, so its time grows with the rows; dequantizing once costs about
# as much as 48 rows of it (4096 x 11008, AVX512), and the smaller bound leaves room for CPUs with a faster GEMM.
INT4_MAX_ROWS = 32

# The int8 kernel's time grows with the rows just as the int4 kernel's does.
INT8_MAX_ROWS = 32

# The kernel takes these group sizes; fewer, longer groups read fewer scales.
INT4_KERNEL_GROUP_SIZES = (256, 128, 64, 32)

# The kernel takes only multiples of this many output features; ours are padded with zero rows.
INT4_KERNEL_OUT_MULTIPLE = 16

# Weights dequantized and multiplied at once. Blocks from 2**18 to 2**22 weights took the same CPU time within 30%, but
# on a busy CPU every pass may wait for a thread, so few large blocks are better; 32 MB of them are still little.
DEQUANTIZE_BLOCK = 2**22


@dataclass(frozen=True)
class PackedWeight:
    """A weight matrix as codes on per-group integer grids: `weight = (code - zero) * scale`.

    Args:
        codes (`torch.Tensor` of shape `(out_features, packed_columns)`): uint8, from [`~ops.packing.pack_codes`].
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
        rows, columns = self.codes.shape[0], packed_columns(self.in_features, self.bits)
        expected = {"codes": (rows, columns), "scale": (rows, self.groups), "zero": (rows, self.groups)}
        for name, shape in expected.items():
            if tuple(getattr(self, name).shape) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(getattr(self, name).shape)}; {self.in_features} inputs at "
                    f"{self.bits} bits with group_size={self.group_size} take {shape}."
                )

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def groups(self) -> int:
        return 1 if self.group_size == -1 else max(1, -(-self.in_features // self.group_size))

    @property
    def columns_per_group(self) -> int:
        """`group_size`, or all columns where a row is one group."""
        return self.in_features if self.groups == 1 else self.group_size


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


@dataclass(frozen=True)
class Choice:
    """A backend and why it was taken."""

    name: str
    reason: str


def dequantize(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight as floats, `(code - zero) * scale` in float32 and then cast.

    This is the reference that every other path is tested against.

    Args:
        weight ([`PackedWeight`]): the weight.
        dtype (`torch.dtype`, defaults to `torch.float32`): of the result.

    Returns:
        `torch.Tensor` of shape `(out_features, in_features)`.
    """
    codes = unpack_codes(weight.codes, weight.bits, weight.in_features)
    return (codes.float() - _per_column(weight.zero.float(), weight)).mul_(_per_column(weight.scale, weight)).to(dtype)


def prepare_cpu(weight: PackedWeight) -> CpuWeight | None:
    """Copy a weight into the layout of a PyTorch CPU kernel, for fast calls with few rows.

    Widths of 2, 3 and 4 bits take the int4 kernel where `in_features` and `group_size` (or a whole row) are multiples
    of 32; 8 bits take the int8 kernel where a row is one group. The copy takes 4 or 8 bits a weight. Keep it beside
    the module, outside its state, and make it again when the codes change.

    Returns:
        [`CpuWeight`], or `None` where no kernel fits; [`choose_backend`] says why.
    """
    if _why_no_cpu_kernel(weight) is not None:
        return None
    return _prepare_int8(weight) if weight.bits == 8 else _prepare_int4(weight)


def low_bit_linear(
    hidden_states: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    runtime: CpuWeight | None = None,
) -> torch.Tensor:
    """`hidden_states @ dequantize(weight).T + bias`, without keeping the dequantized weight.

    Differentiable in `hidden_states` and `bias`; the backward pass dequantizes again, so only packed weights stay in
    memory. Runs in the dtype of `hidden_states`, or of autocast where that is on.

    Args:
        hidden_states (`torch.Tensor` of shape `(..., in_features)`): float32, bfloat16 or float16.
        weight ([`PackedWeight`]): the weight.
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*): added to the result.
        runtime ([`CpuWeight`], *optional*): from [`prepare_cpu`], for the kernels that serve few rows.

    Returns:
        `torch.Tensor` of shape `(..., out_features)`.

    Raises:
        ValueError: the last axis of `hidden_states` is not `in_features`, or a forced backend cannot serve the call.
    """
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type):
        hidden_states = hidden_states.to(torch.get_autocast_dtype(device_type))
    if bias is not None and bias.dtype != hidden_states.dtype:
        bias = bias.to(hidden_states.dtype)
    if torch.is_grad_enabled() and (hidden_states.requires_grad or (bias is not None and bias.requires_grad)):
        return _LowBitLinear.apply(hidden_states, bias, weight, runtime)
    return _forward(hidden_states, weight, bias, runtime)


_forced_backend: str | None = None


@contextmanager
def force_backend(name: str) -> Iterator[None]:
    """Take this backend in every [`low_bit_linear`] call inside the `with` block, in all threads.

    Args:
        name (`str`): "int4", "int8", "dequantize" or "reference".

    Raises:
        ValueError: `name` is none of these; or, at a call inside, the backend cannot serve it.
    """
    global _forced_backend
    if name not in _BACKENDS:
        raise ValueError(f"backend is {name!r}; pass one of {', '.join(_BACKENDS)}.")
    previous, _forced_backend = _forced_backend, name
    try:
        yield
    finally:
        _forced_backend = previous


def choose_backend(
    weight: PackedWeight,
    rows: int,
    dtype: torch.dtype,
    device_type: str = "cpu",
    runtime: CpuWeight | None = None,
) -> Choice:
    """The backend that [`low_bit_linear`] takes for a call, and why.

    Args:
        weight ([`PackedWeight`]): the weight.
        rows (`int`): rows of `hidden_states`, all leading axes together.
        dtype (`torch.dtype`): of `hidden_states`.
        device_type (`str`, defaults to `"cpu"`): of `hidden_states`.
        runtime ([`CpuWeight`], *optional*): as given to [`low_bit_linear`].

    Returns:
        [`Choice`]: `name` is "int4", "int8", "dequantize" or "reference".

    Raises:
        ValueError: a backend is forced and cannot serve the call.
    """
    if _forced_backend is not None:
        return _forced_choice(weight, dtype, device_type, runtime)
    if device_type == "cpu":
        if runtime is not None and dtype is torch.bfloat16 and rows <= _MAX_ROWS[runtime.backend]:
            return _KERNEL_CHOICES[runtime.backend]
        if torch.compiler.is_compiling():
            return _REFERENCE_COMPILED
        if _blocks_fit(weight):
            return _dequantize_choice(weight, dtype, runtime)
        return _REFERENCE_GROUPS
    return _REFERENCE_DEVICE


_MAX_ROWS = {"int4": INT4_MAX_ROWS, "int8": INT8_MAX_ROWS}
_KERNEL_CHOICES = {
    "int4": Choice("int4", f"PyTorch's int4 CPU kernel: bfloat16, at most {INT4_MAX_ROWS} rows"),
    "int8": Choice("int8", f"PyTorch's int8 CPU kernel: bfloat16, at most {INT8_MAX_ROWS} rows"),
}
_DEQUANTIZE_ROWS = Choice("dequantize", "too many rows for the kernels: dequantize block by block, then GEMM")
_DEQUANTIZE_DTYPE = Choice("dequantize", "the kernels are slow outside bfloat16: dequantize block by block, then GEMM")
_DEQUANTIZE_RUNTIME = Choice("dequantize", "no kernel copy from prepare_cpu: dequantize block by block, then GEMM")
_REFERENCE_COMPILED = Choice("reference", "inside torch.compile, which fuses the reference itself")
_REFERENCE_GROUPS = Choice("reference", f"group_size is no multiple of {COLUMN_MULTIPLE}: no faster path unpacks it")
_REFERENCE_DEVICE = Choice("reference", "no faster path on this device")


def _dequantize_choice(weight: PackedWeight, dtype: torch.dtype, runtime: CpuWeight | None) -> Choice:
    if dtype is not torch.bfloat16:
        return _DEQUANTIZE_DTYPE
    if runtime is not None:
        return _DEQUANTIZE_ROWS
    reason = _why_no_cpu_kernel(weight)
    return _DEQUANTIZE_RUNTIME if reason is None else Choice("dequantize", f"{reason}: dequantize, then GEMM")


def _forced_choice(weight: PackedWeight, dtype: torch.dtype, device_type: str, runtime: CpuWeight | None) -> Choice:
    name, obstacle = _forced_backend, None
    if name == "dequantize" and not _blocks_fit(weight):
        obstacle = f"group_size={weight.group_size} is no multiple of {COLUMN_MULTIPLE}"
    elif name in _KERNEL_CHOICES:
        if device_type != "cpu" or dtype is not torch.bfloat16:
            obstacle = f"hidden_states are {dtype} on {device_type}; the kernel takes torch.bfloat16 on cpu"
        elif runtime is None or runtime.backend != name:
            obstacle = _why_no_cpu_kernel(weight) or "no copy for it: pass runtime=prepare_cpu(weight)"
    if obstacle is not None:
        raise ValueError(f"backend {name!r} is forced, but {obstacle}. Leave force_backend, or force 'reference'.")
    return Choice(name, "forced")


def _why_no_cpu_kernel(weight: PackedWeight) -> str | None:
    if weight.codes.device.type != "cpu":
        return f"the weight is on {weight.codes.device.type}"
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return "PyTorch's low-bit kernels are fast only with AVX2 or AVX512"
    if weight.bits == 8:
        return None if weight.groups == 1 else "PyTorch's int8 kernel takes one scale a row"
    if _int4_group_size(weight) is None:
        return "PyTorch's int4 kernel takes in_features and group_size in multiples of 32"
    return None


def _int4_group_size(weight: PackedWeight) -> int | None:
    fits = (
        size for size in INT4_KERNEL_GROUP_SIZES if weight.in_features % size == weight.columns_per_group % size == 0
    )
    return next(fits, None)


def _blocks_fit(weight: PackedWeight) -> bool:
    return weight.groups == 1 or weight.group_size % COLUMN_MULTIPLE == 0


def _prepare_int4(weight: PackedWeight) -> CpuWeight:
    # The kernel computes (code - 8) * scale + offset, with scale and offset in bfloat16, on its own, smaller groups.
    # Below 4 bits, code - zero + 8 still fits in 4 bits, so that the offset is 0 and costs no accuracy.
    group_size, codes = _int4_group_size(weight), unpack_codes(weight.codes, weight.bits, weight.in_features).int()
    offset = (8 - weight.zero.float()) * weight.scale
    if weight.bits < 4:
        codes += 8 - _per_column(weight.zero.int(), weight)
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


def _forward(
    hidden_states: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, runtime: CpuWeight | None
) -> torch.Tensor:
    shape = hidden_states.shape
    if shape[-1] != weight.in_features:
        raise ValueError(f"hidden_states have shape {tuple(shape)}; this weight takes (..., {weight.in_features}).")
    rows = hidden_states.reshape(-1, weight.in_features)
    if rows.shape[0] == 0:
        return hidden_states.new_empty(*shape[:-1], weight.out_features)
    choice = choose_backend(weight, rows.shape[0], hidden_states.dtype, hidden_states.device.type, runtime)
    return _BACKENDS[choice.name](rows, weight, bias, runtime).view(*shape[:-1], weight.out_features)


def _int4(rows: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, runtime: CpuWeight) -> torch.Tensor:
    output = torch.ops.aten._weight_int4pack_mm_for_cpu(
        rows.contiguous(), runtime.codes, runtime.group_size, runtime.scale
    )
    if output.shape[1] != weight.out_features:
        output = output[:, : weight.out_features].contiguous()
    return output if bias is None else output.add_(bias)


def _int8(rows: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, runtime: CpuWeight) -> torch.Tensor:
    output = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), runtime.codes, runtime.scale)
    # In float32: the two parts may cancel.
    output = torch.addcmul(output.float(), rows.float().sum(1, keepdim=True), runtime.row_offset)
    return (output if bias is None else output.add_(bias)).to(rows.dtype)


def _reference(
    rows: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, runtime: CpuWeight | None
) -> torch.Tensor:
    return F.linear(rows, dequantize(weight, rows.dtype), bias)


def _dequantize_blocks(
    rows: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, runtime: CpuWeight | None
) -> torch.Tensor:
    rows = _to_planes(rows, weight)
    step = max(1, DEQUANTIZE_BLOCK // rows.shape[1])
    if step >= weight.out_features:
        return F.linear(rows, _dequantize_planes(weight, 0, weight.out_features, rows.dtype), bias)
    output = rows.new_empty(rows.shape[0], weight.out_features)
    buffer = rows.new_empty(step, rows.shape[1])
    for start in range(0, weight.out_features, step):
        stop = min(start + step, weight.out_features)
        block = _dequantize_planes(weight, start, stop, rows.dtype, buffer[: stop - start])
        output[:, start:stop] = F.linear(rows, block, None if bias is None else bias[start:stop])
    return output


def _plane_shape(weight: PackedWeight) -> tuple[int, int, int]:
    # (planes, groups, columns of one group in one plane), with columns padded to whole groups
    planes = CODES_PER_UNIT[weight.bits]
    columns = -(-weight.columns_per_group // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    return planes, weight.groups, columns // planes


def _to_planes(rows: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    # Reordering the inputs once is far cheaper than putting every unpacked weight back in its column.
    planes, groups, columns = _plane_shape(weight)
    rows = F.pad(rows, (0, planes * groups * columns - weight.in_features))
    return rows.unflatten(1, (-1, planes)).transpose(1, 2).reshape(rows.shape[0], -1)


def _from_planes(rows: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    planes = CODES_PER_UNIT[weight.bits]
    return rows.unflatten(1, (planes, -1)).transpose(1, 2).flatten(1)[:, : weight.in_features]


def _dequantize_planes(
    weight: PackedWeight, start: int, stop: int, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows `start` to `stop` of the weight with its columns in the order of [`_to_planes`]."""
    planes, groups, columns = shape = _plane_shape(weight)
    if out is None:
        out = torch.empty(stop - start, planes * groups * columns, dtype=dtype)
    units = -(-weight.in_features // COLUMN_MULTIPLE) * COLUMN_MULTIPLE // planes
    step = min(max(1, DEQUANTIZE_BLOCK // out.shape[1]), stop - start)
    codes = torch.empty(step, planes, groups * columns, dtype=torch.uint8)
    codes[:, :, units:] = 0  # past the last unit nothing is unpacked, and the values must be finite
    values = torch.empty(step, *shape, dtype=torch.float32)
    zero, scale = weight.zero.float()[:, None, :, None], weight.scale[:, None, :, None]
    for first in range(start, stop, step):
        last = min(first + step, stop)
        size = last - first
        code_planes(weight.codes[first:last], weight.bits, out=codes[:size, :, :units])
        block = values[:size].copy_(codes[:size].view(size, *shape))
        block.sub_(zero[first:last]).mul_(scale[first:last])
        out[first - start : last - start].view(size, *shape).copy_(block)
    return out


def _per_column(per_group: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    if weight.groups == 1:
        return per_group
    return per_group.repeat_interleave(weight.group_size, dim=1)[:, : weight.in_features]


_BACKENDS = {"int4": _int4, "int8": _int8, "dequantize": _dequantize_blocks, "reference": _reference}


class _LowBitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states, bias, weight, runtime):
        ctx.weight = weight
        return _forward(hidden_states, weight, bias, runtime)

    @staticmethod
    def backward(ctx, grad_output):
        weight = ctx.weight
        grad_hidden_states = grad_bias = None
        rows = grad_output.reshape(-1, weight.out_features)
        if ctx.needs_input_grad[0]:
            grad_hidden_states = _input_gradient(rows, weight).reshape(*grad_output.shape[:-1], weight.in_features)
        if ctx.needs_input_grad[1]:
            grad_bias = rows.sum(0)
        return grad_hidden_states, grad_bias, None, None


def _input_gradient(rows: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    if rows.device.type == "cpu" and _blocks_fit(weight):
        return _from_planes(rows @ _dequantize_planes(weight, 0, weight.out_features, rows.dtype), weight)
    return rows @ dequantize(weight, rows.dtype)
