"""A linear layer over sums of products of two sign matrices with scales: its paths, and the choice between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_ext.ops.cpu_kernels import CpuWeight, prepare_cpu
from hf_ext.ops.frozen_linear import frozen_linear
from hf_ext.ops.low_bit_linear import INT4_MAX_ROWS, Choice, forced_backend
from hf_ext.ops.packed_weight import PackedWeight
from hf_ext.ops.packing import pack_codes, packed_rows, unit_of, unpack_units


# The int4 kernel's smallest group: ranks are padded to whole groups, and `in_features` must be whole ones.
KERNEL_MULTIPLE = 32


@dataclass(frozen=True)
class FactoredWeight:
    """`sum_p diag(out_scale_p) U_p diag(latent_scale_p) V_p diag(in_scale_p)`, with U_p and V_p of entries -1 and 1.

    Args:
        u_signs (`torch.Tensor` of shape `(paths, ceil(rank / 8), out_features)`): uint8, each path as
            [`~ops.packing.pack_codes`] packs 1-bit codes; a set bit stands for -1.
        v_signs (`torch.Tensor` of shape `(paths, ceil(in_features / 8), rank)`): likewise.
        out_scale (`torch.Tensor` of shape `(paths, out_features)`): bfloat16.
        latent_scale (`torch.Tensor` of shape `(paths, rank)`): bfloat16.
        in_scale (`torch.Tensor` of shape `(paths, in_features)`): bfloat16.
        in_features (`int`): columns of the weight.
        rank (`int`): of each path.
    """

    u_signs: torch.Tensor
    v_signs: torch.Tensor
    out_scale: torch.Tensor
    latent_scale: torch.Tensor
    in_scale: torch.Tensor
    in_features: int
    rank: int

    def __post_init__(self) -> None:
        paths, out_features = self.out_scale.shape
        expected = {
            "u_signs": (paths, packed_rows(self.rank, 1), out_features),
            "v_signs": (paths, packed_rows(self.in_features, 1), self.rank),
            "latent_scale": (paths, self.rank),
            "in_scale": (paths, self.in_features),
        }
        for name, shape in expected.items():
            if tuple(getattr(self, name).shape) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(getattr(self, name).shape)}; {paths} paths of rank {self.rank} from "
                    f"{self.in_features} to {out_features} features take {shape}."
                )

    @property
    def paths(self) -> int:
        return self.out_scale.shape[0]

    @property
    def out_features(self) -> int:
        return self.out_scale.shape[1]

    @property
    def bits_per_weight(self) -> float:
        """Bits of all tensors over the entries of the weight they stand for."""
        tensors = (self.u_signs, self.v_signs, self.out_scale, self.latent_scale, self.in_scale)
        return 8 * sum(tensor.nbytes for tensor in tensors) / (self.out_features * self.in_features)


@dataclass(frozen=True)
class FactoredCpuWeight:
    """What PyTorch's int4 CPU kernel reads, made once by [`prepare_factored_cpu`]; never saved. 4 bits a sign.

    Args:
        latents (`tuple[CpuWeight, ...]`): a path's `diag(latent_scale) V` each, rows padded to whole kernel groups.
        outputs ([`CpuWeight`]): `diag(out_scale) U` of all paths side by side.
    """

    latents: tuple[CpuWeight, ...]
    outputs: CpuWeight


def pack_signs(signs: torch.Tensor) -> torch.Tensor:
    """Pack a matrix of -1 and 1, `(rows, columns)`, to `(ceil(columns / 8), rows)` bytes; a set bit stands for -1."""
    return pack_codes((signs < 0).to(torch.uint8), 1)


def unpack_signs(packed: torch.Tensor, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The matrix that [`pack_signs`] packed, transposed: `(columns, rows)`."""
    codes_per_unit, unit = unit_of(1)
    units = packed.unflatten(0, (-1, unit))
    codes = torch.empty(units.shape[0], codes_per_unit, packed.shape[1], dtype=torch.uint8, device=packed.device)
    unpack_units(units, 1, codes)
    return codes.flatten(0, 1)[:columns].view(torch.int8).mul_(-2).add_(1).to(dtype)


def dequantize_factored(weight: FactoredWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight as floats, computed in float32 or better and then cast.

    This is the reference that every other path is tested against.

    Args:
        weight ([`FactoredWeight`]): the weight.
        dtype (`torch.dtype`, defaults to `torch.float32`): of the result.

    Returns:
        `torch.Tensor` of shape `(out_features, in_features)`.
    """
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.zeros(weight.out_features, weight.in_features, dtype=wide, device=weight.u_signs.device)
    for path in range(weight.paths):
        rows = unpack_signs(weight.u_signs[path], weight.rank, wide).t() * weight.latent_scale[path].to(wide)
        product = rows @ unpack_signs(weight.v_signs[path], weight.in_features, wide).t()
        total += product * weight.out_scale[path].to(wide)[:, None] * weight.in_scale[path].to(wide)
    return total.to(dtype)


def prepare_factored_cpu(weight: FactoredWeight) -> FactoredCpuWeight | None:
    """Copy a weight into the layout of PyTorch's int4 CPU kernel, for fast calls with few rows.

    Keep the copy beside the module, outside its state, and make it again when the signs change.

    Returns:
        [`FactoredCpuWeight`], or `None` where the kernel does not fit: off the CPU, without AVX2, or with
        `in_features` that are no multiple of 32.
    """
    if weight.u_signs.device.type != "cpu" or weight.in_features % KERNEL_MULTIPLE:
        return None
    padding = -weight.rank % KERNEL_MULTIPLE
    latents, outputs = [], []
    for path, (u_signs, v_signs) in enumerate(_unpacked_paths(weight, torch.int8)):
        # A sign is code 0 or 2 around zero point 1; code 1, which pads the rank, is a weight of 0.
        scale = F.pad(weight.latent_scale[path], (0, padding))
        latents.append(_kernel_copy(F.pad(1 + v_signs.t(), (0, 0, 0, padding), value=1), scale[:, None]))
        outputs.append(F.pad(1 + u_signs.t(), (0, padding), value=1))
    outputs = _kernel_copy(torch.cat(outputs, 1), weight.out_scale.t(), group_size=weight.rank + padding)
    return None if outputs is None else FactoredCpuWeight(tuple(latents), outputs)


def factored_binary_linear(
    hidden_states: torch.Tensor,
    weight: FactoredWeight,
    bias: torch.Tensor | None = None,
    runtime: FactoredCpuWeight | None = None,
) -> torch.Tensor:
    """`hidden_states @ dequantize_factored(weight).T + bias`, by its factors: the weight itself is never made.

    Differentiable in `hidden_states` and `bias`; the backward pass unpacks the signs again, so that only packed
    weights stay in memory. Runs in the dtype of `hidden_states`, or of autocast where that is on.

    Args:
        hidden_states (`torch.Tensor` of shape `(..., in_features)`): float32, bfloat16 or float16.
        weight ([`FactoredWeight`]): the weight.
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*): added to the result.
        runtime ([`FactoredCpuWeight`], *optional*): from [`prepare_factored_cpu`], for few rows in bfloat16.

    Returns:
        `torch.Tensor` of shape `(..., out_features)`.

    Raises:
        ValueError: the last axis of `hidden_states` is not `in_features`, or a forced backend cannot serve the call.
    """
    return frozen_linear(hidden_states, weight, bias, runtime, _forward, _input_gradient)


def choose_factored_backend(
    rows: int, dtype: torch.dtype, device_type: str = "cpu", runtime: FactoredCpuWeight | None = None
) -> Choice:
    """The backend that [`factored_binary_linear`] takes for a call, and why; [`force_backend`] forces it, too.

    Args:
        rows (`int`): rows of `hidden_states`, all leading axes together.
        dtype (`torch.dtype`): of `hidden_states`.
        device_type (`str`, defaults to `"cpu"`): of `hidden_states`.
        runtime ([`FactoredCpuWeight`], *optional*): as given to [`factored_binary_linear`].

    Returns:
        [`Choice`]: `name` is "int4" (the CPU kernel), "dequantize" (unpack the signs, then two products a path) or
        "reference" (make the whole weight; only where it is forced).

    Raises:
        ValueError: a backend is forced and cannot serve the call.
    """
    serves = runtime is not None and dtype is torch.bfloat16 and device_type == "cpu"
    forced = forced_backend()
    if forced is not None:
        if forced not in _BACKENDS or (forced == "int4" and not serves):
            raise ValueError(
                f"backend {forced!r} is forced, but hidden_states are {dtype} on {device_type} with "
                f"{'a' if runtime else 'no'} kernel copy; a factored weight has 'dequantize' and 'reference', and for "
                "torch.bfloat16 on cpu with runtime=prepare_factored_cpu(weight) 'int4'."
            )
        return Choice(forced, "forced")
    if serves and rows <= INT4_MAX_ROWS:
        return _INT4
    return _DEQUANTIZE_ROWS if serves else _DEQUANTIZE


_INT4 = Choice("int4", f"PyTorch's int4 CPU kernel: bfloat16, at most {INT4_MAX_ROWS} rows")
_DEQUANTIZE_ROWS = Choice("dequantize", "too many rows for the kernel: unpack the signs, then two GEMMs a path")
_DEQUANTIZE = Choice("dequantize", "no kernel copy for this dtype and device: unpack the signs, then two GEMMs a path")


def _forward(
    rows: torch.Tensor, weight: FactoredWeight, bias: torch.Tensor | None, runtime: FactoredCpuWeight | None
) -> torch.Tensor:
    choice = choose_factored_backend(rows.shape[0], rows.dtype, rows.device.type, runtime)
    return _BACKENDS[choice.name](rows, weight, bias, runtime)


def _int4(rows, weight, bias, runtime):
    latents = [
        _kernel(_scaled(rows, scale), part) for scale, part in zip(weight.in_scale, runtime.latents, strict=True)
    ]
    output = _kernel(torch.cat(latents, 1), runtime.outputs)[:, : weight.out_features].contiguous()
    return output if bias is None else output.add_(bias)


def _dequantize(rows, weight, bias, runtime=None):
    output = sum(
        _through(rows, weight.in_scale[path], v_signs, weight.latent_scale[path], u_signs, weight.out_scale[path])
        for path, (u_signs, v_signs) in enumerate(_unpacked_paths(weight, rows.dtype))
    )
    return (output if bias is None else output.add_(bias)).to(rows.dtype)


def _reference(rows, weight, bias, runtime=None):
    return F.linear(rows, dequantize_factored(weight, rows.dtype), bias)


_BACKENDS = {"int4": _int4, "dequantize": _dequantize, "reference": _reference}


def _unpacked_paths(weight: FactoredWeight, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for u_signs, v_signs in zip(weight.u_signs, weight.v_signs, strict=True):
        yield unpack_signs(u_signs, weight.rank, dtype), unpack_signs(v_signs, weight.in_features, dtype)


def _through(rows, before, first, between, second, after) -> torch.Tensor:
    """`(((rows * before) @ first) * between) @ second * after`, in float32 or better: paths are yet to be summed."""
    latents = _scaled(_scaled(rows, before) @ first, between)
    return (latents @ second) * after.to(torch.promote_types(rows.dtype, torch.float32))


def _scaled(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # float16 times bfloat16 is float32: a scale is never rounded, nor lost to float16's range.
    return (rows * scale).to(rows.dtype)


def _kernel_copy(codes: torch.Tensor, scale: torch.Tensor, group_size: int = -1) -> CpuWeight | None:
    codes, scale = codes.to(torch.uint8), scale.float().contiguous()
    zero = torch.ones(scale.shape, dtype=torch.uint8)
    return prepare_cpu(PackedWeight(pack_codes(codes, 2), scale, zero, 2, codes.shape[1], group_size))


def _kernel(rows: torch.Tensor, weight: CpuWeight) -> torch.Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(rows.contiguous(), weight.codes, weight.group_size, weight.scale)


def _input_gradient(rows: torch.Tensor, weight: FactoredWeight) -> torch.Tensor:
    return sum(
        _through(
            rows, weight.out_scale[path], u_signs.t(), weight.latent_scale[path], v_signs.t(), weight.in_scale[path]
        )
        for path, (u_signs, v_signs) in enumerate(_unpacked_paths(weight, rows.dtype))
    ).to(rows.dtype)
