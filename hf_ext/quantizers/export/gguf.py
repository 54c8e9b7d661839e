"""A model with ternary weights as one GGUF file, its codes unchanged."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ...core.errors import MissingExtraError, closest
from ...ops.packed_weight import PackedWeight
from ...ops.packing import unpack_codes
from .blocks import FORMATS, BlockFormat, encode_rows
from .gguf_metadata import Architecture, add_metadata, find_architecture, rope_factors, row_order
from .gguf_tokenizer import add_vocabulary, read_vocabulary
from .layers import FP16_MAX, Problems, check_whole, low_bit_linears
from .report import ExportReport, relative_error


if TYPE_CHECKING:
    from gguf import GGUFWriter, TensorNameMap
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file: its name, logical shape, type and size there, and how its values are made."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    nbytes: int
    make: Callable[[], np.ndarray]


def export_gguf(
    model: PreTrainedModel,
    path: str | os.PathLike,
    format: str = "tq2_0",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    allow_lossy: bool = False,
) -> ExportReport:
    """Write a model with ternary weights as a GGUF file, for llama.cpp and what is built on it.

    The codes in the file are the model's. The scales are the model's rounded to fp16, which changes a weight by at
    most 2^-11 of itself (by 2^-25 where a scale is below 6.1e-5). Embeddings, head and float linears become fp16,
    norms and biases fp32. Rounding of activations (`activation_bits=8`) is not part of the file.

    Args:
        model ([`~transformers.PreTrainedModel`]): Llama, Mistral or Qwen3, with ternary `LowBitLinear` layers (2 bits,
            every zero 1, codes 0 to 2).
        path (`str`): the file to write; one that exists is replaced once the new one is complete.
        format (`str`, defaults to `"tq2_0"`): what the blocks are.

            - `"tq2_0"` (2.06 bits a weight) and `"tq1_0"` (1.69): llama.cpp, a scale for 256 columns.
            - `"q2_0_g64"` (2.25): llama.cpp of 2026 and later, which calls it Q2_0, a scale for 64 columns.
            - `"q2_0"` (2.125): the Q2_0 of earlier PrismML builds, a scale for 128 columns. Its type has the same
              number, 42, as llama.cpp's Q2_0: a build of the other kind refuses the file or misreads it.
            - `"pq2_0"` (2.125): the same blocks under the number that PrismML's builds give them now, 142.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): its vocabulary and chat template go into the
            file. Without one llama.cpp takes token ids only.
        allow_lossy (`bool`, defaults to `False`): where a block holds columns of two scales, keep one, the
            least-squares one, and say in the report what was lost.

    Returns:
        [`ExportReport`]: the relative error of every weight, and which lost scales.

    Raises:
        ImportError: without the `quant` extra.
        ValueError: before anything is written, if the model, a weight or the tokenizer does not fit the format.

    Example:

    ```python
    from hf_ext.quantizers.export import export_gguf

    report = export_gguf(model, "model.gguf", "tq2_0", tokenizer=tokenizer)
    ```
    """
    try:
        import gguf
    except ImportError as error:
        raise MissingExtraError("gguf", "quant", "export_gguf") from error
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is unknown.{closest(format, FORMATS)}")
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; give a file, such as {str(path / 'model.gguf')!r}.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{str(path)!r}: there is no folder {str(path.parent)!r}.")
    architecture = find_architecture(model.config)
    layers = low_bit_linears(model)
    check_whole(model, layers)
    lossy = check_ternary({name: layer.packed for name, layer in layers.items()}, format, allow_lossy)
    vocabulary = None if tokenizer is None else read_vocabulary(tokenizer, model.config.vocab_size)
    errors: dict[str, float] = {}
    tensors = [*float_tensors(model, architecture), *ternary_tensors(model, architecture, FORMATS[format], errors)]

    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, architecture.name)
    add_metadata(writer, model, FORMATS[format].file_type)
    add_vocabulary(writer, vocabulary)
    try:
        write_tensors(writer, tensors, FORMATS[format].name)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    report = ExportReport(str(path), f"GGUF {FORMATS[format].name}", path.stat().st_size, errors, tuple(lossy))
    if lossy:
        warnings.warn(str(report), stacklevel=2)
    return report


def check_ternary(weights: dict[str, PackedWeight], format: str, allow_lossy: bool) -> list[str]:
    """Return the names of the weights whose scales do not fit `format` one by one.

    Raises:
        ValueError: if a weight does not fit at all, or one would be returned without `allow_lossy`.
    """
    block_format, problems, lossy = FORMATS[format], Problems(), []
    for name, weight in weights.items():
        if not is_ternary(weight):
            problems.add(name, f"is not ternary ({weight.bits} bits)", "export_gptq takes weights of other codes")
        elif weight.in_features % block_format.block_size:
            problems.add(
                name,
                f"has {weight.in_features} columns, no multiple of {block_format.block_size}",
                "leave such layers float with modules_to_not_convert",
            )
        elif not weight.scale.abs().le(FP16_MAX).all():
            problems.add(name, "has scales over 65504, the largest of fp16", "look at what the quantizer did there")
        elif not shares_no_scale(weight, block_format.block_size):
            lossy.append(name)
            if not allow_lossy:
                problems.add(
                    name,
                    f"has a scale for {weight.group_size} columns, no multiple of {block_format.block_size}",
                    f"quantize with group_size={block_format.block_size}, or pass allow_lossy=True to keep one scale "
                    f"for {block_format.block_size} columns",
                )
    if problems.found:
        exact = [name for name, other in FORMATS.items() if all(fits(weight, other) for weight in weights.values())]
        problems.ways_out += [f"take a format that holds them exactly: {', '.join(exact)}"] if exact else []
    problems.raise_if_any(f"format={format!r} cannot hold these weights")
    return lossy


def is_ternary(weight: PackedWeight) -> bool:
    if weight.bits != 2 or not bool((weight.zero == 1).all()):
        return False
    return int(unpack_codes(weight.codes, weight.bits, weight.in_features).max()) <= 2


def shares_no_scale(weight: PackedWeight, block_size: int) -> bool:
    """Whether no block of `block_size` columns holds columns of two groups."""
    return weight.groups == 1 or weight.group_size % block_size == 0


def fits(weight: PackedWeight, block_format: BlockFormat) -> bool:
    """Whether a ternary weight can be written exactly."""
    size = block_format.block_size
    return weight.in_features % size == 0 and shares_no_scale(weight, size) and is_ternary(weight)


def scales_in_blocks(weight: PackedWeight, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the scales that each block spans, and how many of its codes are not 0 under each.

    Both are `[out, blocks, scales of a block]`. A block that lies in one group has one scale.
    """
    unit = math.gcd(weight.columns_per_group, block_size)
    starts = torch.arange(0, weight.in_features, unit, device=weight.scale.device)
    scales = weight.scale[:, starts // weight.columns_per_group]
    used = unpack_codes(weight.codes, weight.bits, weight.in_features) != 1
    counts = used.unflatten(1, (-1, unit)).sum(2)
    return tuple(values.unflatten(1, (-1, block_size // unit)) for values in (scales, counts))


def block_scales(scales: Tensor, counts: Tensor) -> Tensor:
    """Return one scale a block, fp32 `[out, blocks]`: the one it has, or the least-squares one in place of several.

    With the codes kept, that is `sum(T^2 scale) / sum(T^2)` over the block, `T = code - 1`.
    """
    if scales.shape[2] == 1:
        return scales[:, :, 0]
    return (counts * scales).sum(2) / counts.sum(2).clamp(min=1)


def ternary_tensors(
    model: PreTrainedModel, architecture: Architecture, block_format: BlockFormat, errors: dict[str, float]
) -> Iterator[GgufTensor]:
    """Yield the packed weights as blocks; making one notes its relative error in `errors`."""
    for name, layer in low_bit_linears(model).items():
        weight_name = f"{name}.weight"
        order = rows_of(weight_name, layer.out_features, model, architecture)

        def make(name: str = name, weight: PackedWeight = layer.packed, order: Tensor | None = order) -> np.ndarray:
            exact, counts = scales_in_blocks(weight, block_format.block_size)
            scales = block_scales(exact, counts).half()
            errors[name] = relative_error(scales.unsqueeze(2), exact, counts)
            codes = unpack_codes(weight.codes, weight.bits, weight.in_features)
            if order is not None:
                codes, scales = codes[order.to(codes.device)], scales[order.to(codes.device)]
            return encode_rows(codes.cpu().numpy(), scales.cpu().numpy(), block_format)

        shape = (layer.out_features, layer.in_features)
        nbytes = layer.out_features * layer.in_features // block_format.block_size * block_format.block_bytes
        yield GgufTensor(gguf_name(weight_name, model, architecture), shape, block_format.type_id, nbytes, make)


def float_tensors(model: PreTrainedModel, architecture: Architecture) -> Iterator[GgufTensor]:
    """Yield what is not packed: fp32 with one axis, fp16 with two. A tied head is not written."""
    from gguf import GGMLQuantizationType

    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    factors = rope_factors(model.config)
    if factors is not None:
        named["rope_freqs.weight"] = factors
    for name, tensor in named.items():
        dtype, type_id = torch.float16, GGMLQuantizationType.F16
        if tensor.dim() == 1:
            dtype, type_id = torch.float32, GGMLQuantizationType.F32
        order = rows_of(name, tensor.shape[0], model, architecture)

        def make(tensor: Tensor = tensor, dtype: torch.dtype = dtype, order: Tensor | None = order) -> np.ndarray:
            tensor = tensor.to("cpu", dtype)
            return (tensor if order is None else tensor[order]).contiguous().numpy()

        nbytes = tensor.numel() * dtype.itemsize
        yield GgufTensor(gguf_name(name, model, architecture), tuple(tensor.shape), type_id, nbytes, make)


@cache
def gguf_names(architecture: str, num_hidden_layers: int) -> TensorNameMap:
    import gguf

    (kind,) = (kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(kind, num_hidden_layers)


def gguf_name(name: str, model: PreTrainedModel, architecture: Architecture) -> str:
    """Return GGUF's name of the tensor that the model calls `name`."""
    names = gguf_names(architecture.name, model.config.num_hidden_layers)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ValueError(
            f"{name!r} has no place in a GGUF file of {architecture.name!r}. Merge adapters (merge_and_unload) and "
            "remove what the model type does not have."
        )
    return found


def rows_of(name: str, rows: int, model: PreTrainedModel, architecture: Architecture) -> Tensor | None:
    """Return the order in which the rows of a weight or bias go into the file, or `None` for the one they have."""
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    module = name.split(".")[-2]
    if not architecture.rotates_neighbours or module not in heads:
        return None
    return row_order(rows, heads[module])


def write_tensors(writer: GGUFWriter, tensors: list[GgufTensor], format_name: str) -> None:
    """Write the file, one tensor in memory at a time."""
    for tensor in tensors:
        # Of any other dtype than uint8 the shape is taken as it is: the package need not know the type's blocks.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.int8), tensor.nbytes, raw_dtype=tensor.type_id)
    writer.write_header_to_file()
    try:
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tqdm(tensors, desc=f"Writing {format_name}", unit="tensor"):
            writer.write_tensor_data(tensor.make())
    finally:
        writer.close()
