"""Tiny models with chosen codes, scales and zeros in the place of their linears."""

import copy

import torch

from hf_ext.core.modules import decoder_blocks, linear_shape, named_linears, replace_module
from hf_ext.ops.packed_weight import PackedWeight
from hf_ext.ops.packing import pack_codes
from hf_ext.quantizers.low_bit_linear import LowBitLinear


# Sizes that every block format divides.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def packed_weight(
    shape: tuple[int, int],
    bits: int = 2,
    group_size: int = 256,
    zero: int | None = 1,
    codes: tuple[int, int] = (0, 3),
    seed: int = 0,
) -> PackedWeight:
    """A weight of codes in `range(*codes)` and scales that fp16 holds; `zero=None` draws one for each group."""
    generator = torch.Generator().manual_seed(seed)
    out_features, in_features = shape
    groups = 1 if group_size == -1 else -(-in_features // group_size)
    drawn = torch.randint(*codes, shape, generator=generator, dtype=torch.uint8)
    scale = (torch.rand(out_features, groups, generator=generator) * 0.03 + 0.01).half().float()
    zeros = torch.randint(0, 2**bits, scale.shape, generator=generator, dtype=torch.uint8)
    if zero is not None:
        zeros = torch.full_like(zeros, zero)
    return PackedWeight(pack_codes(drawn, bits), scale, zeros, bits, in_features, group_size)


def pack(model, only=lambda name: True, **settings):
    """Replace the linears of the blocks of `model` by packed ones, and round everything else to what fp16 holds.

    Norms and biases get values of their own, so that none can be taken for another.
    """
    prefix, blocks = decoder_blocks(model)
    linears = [(name, linear) for name, linear in named_linears(blocks) if only(name)]
    for seed, (name, linear) in enumerate(linears):
        weight = packed_weight(linear_shape(linear), seed=seed, **settings)
        replace_module(model, f"{prefix}.{name}", LowBitLinear.from_packed(linear, weight))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data.half().float()
    return model


def dequantized(model):
    """A copy with float linears in the place of the packed ones."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, LowBitLinear):
            replace_module(model, name, module.to_float())
    return model
