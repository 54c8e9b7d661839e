"""A model with packed weights as a checkpoint in the GPTQ layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import GPTQConfig

from ... import __version__
from ...core.modules import SlicedExperts, fused_experts, named_linears
from ...ops.packed_weight import PackedWeight
from ...ops.packing import pack_codes, unpack_codes
from .layers import FP16_MAX, Problems, check_whole, low_bit_linears
from .report import ExportReport, relative_error


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..low_bit_linear import LowBitLinear


WORD_BITS = 32


def export_gptq(
    model: PreTrainedModel, folder: str | os.PathLike, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> ExportReport:
    """Write a model with packed weights as a checkpoint in the GPTQ layout: vLLM, SGLang and GPTQModel load it.

    Each `code - zero` is the model's. The scales are the model's rounded to fp16, which changes a weight by at most
    2^-11 of itself (by 2^-25 a step where a scale is below 6.1e-5). Float weights keep their dtype. Rounding of
    activations (`activation_bits=8`) is not part of the checkpoint.

    Where every zero of a layer can be moved to `2^(bits - 1)`, together with the codes, it is: some readers of
    symmetric checkpoints assume that zero and read no other. Ternary weights become codes 1, 2 and 3 with the zero 2.
    If this goes for all layers the checkpoint is symmetric (`sym=True`, format `"gptq"`, which stores each zero less
    1); otherwise it has `sym=False` and format `"gptq_v2"`, which stores zeros as they are.

    Args:
        model ([`~transformers.PreTrainedModel`]): a decoder whose `LowBitLinear` layers, in its blocks, share one
            width (2, 3, 4 or 8 bits) and one group size. Each program has kernels for some of these: 4 bits with
            groups of 128 run everywhere; GPTQModel reads all widths with groups of 16, 32, ... 1024 or whole rows.
        folder (`str`): an empty folder, or one that does not exist yet.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): saved beside the weights.

    Returns:
        [`ExportReport`]: the relative error of every weight.

    Raises:
        ValueError: before anything is written, if the folder is in use or a weight does not fit the layout.

    Example:

    ```python
    from hf_ext.quantizers.export import export_gptq

    export_gptq(model, "model-gptq", tokenizer=tokenizer)
    ```
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is not an empty folder; give another.")
    layers = low_bit_linears(model)
    check_whole(model, layers)
    check_layout(model, layers)
    config = gptq_config(model, layers)
    if model.can_generate():
        model.generation_config.validate(strict=True)
    sym = config["sym"]

    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    errors = {}
    for name, layer in tqdm(layers.items(), desc="Packing for GPTQ", unit="layer"):
        packed = gptq_tensors(layer.packed, subtract_one=sym)
        tensors |= {f"{name}.{kind}": tensor for kind, tensor in packed.items()}
        errors[name] = scale_error(layer.packed)
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(tensors, folder, metadata={"format": "pt"})
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    # Last of all: without it a half-written folder is not taken for a model.
    model_config = type(model.config).from_dict(model.config.to_dict())
    model_config.quantization_config = config
    model_config.save_pretrained(folder)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return ExportReport(str(folder), f"GPTQ {config['bits']}-bit", size, errors)


def check_layout(model: PreTrainedModel, layers: dict[str, LowBitLinear]) -> None:
    """Refuse weights that the layout, or the config that describes it, cannot hold.

    Raises:
        ValueError: naming the layers.
    """
    problems, first = Problems(), next(iter(layers.values()))
    blocks_name, blocks = blocks_of(model, layers)
    sliced = [name for name, module in blocks.named_modules() if isinstance(module, SlicedExperts)]
    for name in (*fused_experts(blocks), *sliced):
        problems.add(f"{blocks_name}.{name}", "holds experts", "export a model without experts")
    for name, layer in layers.items():
        if not name.startswith(f"{blocks_name}."):
            problems.add(name, "is outside the decoder blocks", "leave it float with modules_to_not_convert")
        if (layer.bits, layer.group_size) != (first.bits, first.group_size):
            problems.add(
                name,
                f"has {layer.bits} bits and group_size {layer.group_size}, others {first.bits} and {first.group_size}",
                "quantize all layers alike",
            )
        for axis in ("in_features", "out_features"):
            if getattr(layer, axis) * layer.bits % WORD_BITS:
                problems.add(
                    name,
                    f"has {axis} {getattr(layer, axis)}: {layer.bits}-bit codes do not fill whole 32-bit words",
                    "leave such layers float with modules_to_not_convert",
                )
        if not layer.packed.scale.abs().le(FP16_MAX).all():
            problems.add(name, "has scales over 65504, the largest of fp16", "look at what the quantizer did there")
    problems.raise_if_any("The GPTQ layout cannot hold these weights")


def blocks_of(model: PreTrainedModel, layers: dict[str, LowBitLinear]) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of the decoder blocks: the outermost list that holds packed layers.

    Raises:
        ValueError: if none does.
    """
    for name in layers:
        parts = name.split(".")
        for end in range(1, len(parts)):
            module = model.get_submodule(".".join(parts[:end]))
            if isinstance(module, nn.ModuleList):
                return ".".join(parts[:end]), module
    raise ValueError(
        f"None of the packed layers ({', '.join(layers)}) is inside a decoder block: GPTQ packs only those."
    )


def gptq_config(model: PreTrainedModel, layers: dict[str, LowBitLinear]) -> dict[str, Any]:
    """Return the `quantization_config` of the checkpoint.

    Raises:
        ValueError: if the float linears are not the same in every block.
    """
    first = next(iter(layers.values()))
    middle = 2 ** (first.bits - 1)
    sym = all(bool((centred(layer.packed)[1] == middle).all()) for layer in layers.values())
    config = GPTQConfig(
        bits=first.bits,
        group_size=first.group_size,
        desc_act=False,
        act_group_aware=False,
        sym=sym,
        format="gptq" if sym else "gptq_v2",
        meta={"quantizer": [f"hf_ext:{__version__}"]},
    ).to_dict()
    blocks_name, blocks = blocks_of(model, layers)
    packed = [
        {name.removeprefix(f"{blocks_name}.{i}.") for name in layers if name.startswith(f"{blocks_name}.{i}.")}
        for i in range(len(blocks))
    ]
    left_float = [f"{blocks_name}.{name}" for name, _ in named_linears(blocks)]
    if left_float:
        if any(names != packed[0] for names in packed):
            raise ValueError(
                f"Some blocks keep linears float that others have packed ({', '.join(left_float[:8])}): the GPTQ "
                "config names the packed linears of all blocks at once. Quantize the same ones in every block."
            )
        config["modules_in_block_to_quantize"] = [sorted(packed[0])]
    return config


def centred(weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Return codes and zeros of the same weight, zeros `2^(bits - 1)` where the codes then fit in the bits."""
    codes = unpack_codes(weight.codes, weight.bits, weight.in_features)
    shift = 2 ** (weight.bits - 1) - weight.zero.short()
    shifted = codes.short() + weight.per_column(shift)
    if shifted.min() < 0 or shifted.max() >= 2**weight.bits:
        return codes, weight.zero
    return shifted.to(torch.uint8), torch.full_like(weight.zero, 2 ** (weight.bits - 1))


def gptq_tensors(weight: PackedWeight, *, subtract_one: bool) -> dict[str, Tensor]:
    """Return the tensors of one layer.

    Args:
        weight ([`PackedWeight`]): the weight.
        subtract_one (`bool`): store each zero less 1, as format `"gptq"` does.

    Returns:
        `dict[str, Tensor]`: `qweight` int32 `[in * bits / 32, out]`, codes along the inputs, lowest bits first;
        `qzeros` int32 `[groups, out * bits / 32]`, zeros along the outputs; `scales` fp16 `[groups, out]`; `g_idx`
        int32 `[in]`, the group of each input.
    """
    codes, zeros = centred(weight)
    columns = torch.arange(weight.in_features, dtype=torch.int32, device=codes.device)
    return {
        "qweight": words(pack_codes(codes, weight.bits)),
        "qzeros": words(pack_codes((zeros - int(subtract_one)).T.contiguous(), weight.bits).T, dim=1),
        "scales": weight.scale.T.half().contiguous(),
        "g_idx": columns // weight.columns_per_group,
    }


def words(packed: Tensor, dim: int = 0) -> Tensor:
    """Return bytes as int32 words of four along `dim`, the first byte lowest."""
    four = packed.unflatten(dim, (-1, 4)).movedim(dim + 1, -1).contiguous()
    return four.view(torch.int32).squeeze(-1)


def scale_error(weight: PackedWeight) -> float:
    """Return the relative error of the weight with its scales in fp16."""
    codes = unpack_codes(weight.codes, weight.bits, weight.in_features)
    squares = (codes.float() - weight.per_column(weight.zero.float())) ** 2
    missing = weight.groups * weight.columns_per_group - weight.in_features  # of the last group
    squares = F.pad(squares, (0, missing)).unflatten(1, (weight.groups, -1)).sum(2)
    return relative_error(weight.scale.half(), weight.scale, squares)
