"""A linear layer over packed 2, 3, 4 or 8-bit weights: its paths, and the choice between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_ext.ops.cpu_kernels import (
    CpuWeight,
    dequantize_input_gradient,
    dequantize_linear,
    int4_linear,
    int8_linear,
    why_no_cpu_kernel,
)
from hf_ext.ops.frozen_linear import frozen_linear
from hf_ext.ops.packed_weight import PackedWeight, dequantize
from hf_ext.ops.packing import COLUMN_MULTIPLE


# The int4 kernel unpacks the weight again every 4 rows, so its time grows with the rows; dequantizing once costs about
# as much as 28 rows of it (4096 x 11008, AVX512).
INT4_MAX_ROWS = 24

# The int8 kernel's time grows with the rows just as the int4 kernel's does; the blocks catch up at 18 rows.
INT8_MAX_ROWS = 16


@dataclass(frozen=True)
class Choice:
    """A backend and why it was taken."""

    name: str
    reason: str


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
    return frozen_linear(hidden_states, weight, bias, runtime, _forward, _input_gradient)


_forced_backend: str | None = None


@contextmanager
def force_backend(name: str) -> Iterator[None]:
    """Take this backend in every [`low_bit_linear`] and `factored_binary_linear` call inside the `with` block, in all
    threads.

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


def forced_backend() -> str | None:
    """The backend of the [`force_backend`] block that is open, if one is."""
    return _forced_backend


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
        if weight.groups_are_whole_units:
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
    reason = why_no_cpu_kernel(weight)
    return _DEQUANTIZE_RUNTIME if reason is None else Choice("dequantize", f"{reason}: dequantize, then GEMM")


def _forced_choice(weight: PackedWeight, dtype: torch.dtype, device_type: str, runtime: CpuWeight | None) -> Choice:
    name, obstacle = _forced_backend, None
    if name == "dequantize" and not weight.groups_are_whole_units:
        obstacle = f"group_size={weight.group_size} is no multiple of {COLUMN_MULTIPLE}"
    elif name in _KERNEL_CHOICES:
        if device_type != "cpu" or dtype is not torch.bfloat16:
            obstacle = f"hidden_states are {dtype} on {device_type}; the kernel takes torch.bfloat16 on cpu"
        elif runtime is None or runtime.backend != name:
            obstacle = why_no_cpu_kernel(weight) or "no copy for it: pass runtime=prepare_cpu(weight)"
    if obstacle is not None:
        raise ValueError(f"backend {name!r} is forced, but {obstacle}. Leave force_backend, or force 'reference'.")
    return Choice(name, "forced")


def _forward(
    rows: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, runtime: CpuWeight | None
) -> torch.Tensor:
    choice = choose_backend(weight, rows.shape[0], rows.dtype, rows.device.type, runtime)
    return _BACKENDS[choice.name](rows, weight, bias, runtime)


def _reference(
    rows: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, runtime: CpuWeight | None
) -> torch.Tensor:
    return F.linear(rows, dequantize(weight, rows.dtype), bias)


_BACKENDS = {
    "int4": int4_linear,
    "int8": int8_linear,
    "dequantize": dequantize_linear,
    "reference": _reference,
}


def _input_gradient(rows: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    if rows.device.type == "cpu" and weight.groups_are_whole_units and not torch.compiler.is_compiling():
        return dequantize_input_gradient(rows, weight)
    return rows @ dequantize(weight, rows.dtype)
