"""Speed of packed linears on a CPU against bf16, at the shapes of a 7B model, and of a whole 1B-shaped model."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F
from harness import Measure, alternate, rate
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ext import LowBitLinear
from hf_ext.core.modules import named_linears, replace_module
from hf_ext.ops.cpu_kernels import prepare_cpu
from hf_ext.ops.low_bit_linear import low_bit_linear
from hf_ext.ops.packed_weight import PackedWeight
from hf_ext.ops.packing import pack_codes
from hf_ext.quantizers.littlebit2.functional import rank_for
from hf_ext.quantizers.littlebit2.layer import FactoredBinaryLinear
from hf_ext.quantizers.rounding import min_max_grid, round_to_grid


BITS, GROUP_SIZE = 4, 128
FACTORED_BITS = 0.55
SHAPES = {"": (4096, 11008), "/transposed": (11008, 4096)}  # (in, out); a down projection beside an up projection


def random_packed(in_features: int, out_features: int) -> tuple[PackedWeight, torch.Tensor]:
    weight = torch.randn(out_features, in_features) * 0.02
    scale, zero = min_max_grid(weight, BITS, GROUP_SIZE)
    codes = pack_codes(round_to_grid(weight, scale, zero, BITS, GROUP_SIZE), BITS)
    return PackedWeight(codes, scale, zero, BITS, in_features, GROUP_SIZE), weight.bfloat16()


def linear(name: str, rows: int, repeats: int) -> Iterator[Measure]:
    for suffix, (in_features, out_features) in SHAPES.items():
        packed, weight = random_packed(in_features, out_features)
        runtime = prepare_cpu(packed)
        x = torch.randn(rows, in_features, dtype=torch.bfloat16)
        seconds = alternate(
            {
                "ours": lambda x=x, packed=packed, runtime=runtime: low_bit_linear(x, packed, None, runtime),
                "bf16 F.linear": lambda x=x, weight=weight: F.linear(x, weight),
            },
            repeats,
        )
        setup = f"{BITS}-bit group {GROUP_SIZE}, {rows} rows, {in_features} -> {out_features}, bf16 activations"
        yield rate(name + suffix, seconds, rows, "rows per second", setup)


def decode_linear(quick: bool) -> Iterator[Measure]:
    yield from linear("decode_linear_cpu", 1, 50 if quick else 200)


def prefill_linear(quick: bool) -> Iterator[Measure]:
    yield from linear("prefill_linear_cpu", 512, 10 if quick else 40)


def decode(name: str, make_layer: Callable[[nn.Linear], nn.Module], weights: str, quick: bool) -> Iterator[Measure]:
    """Tokens per second of a whole model with the linears of its blocks replaced, against the model in bf16."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    model, low_bit = (LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval() for _ in range(2))
    for layer_name, linear in list(named_linears(low_bit.model)):
        replace_module(low_bit.model, layer_name, make_layer(linear))
    tokens = 64
    prompt = torch.randint(0, config.vocab_size, (1, 8))

    def generate(decoder: LlamaForCausalLM) -> Callable[[], Tensor]:
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return lambda: decoder.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

    seconds = alternate({"ours": generate(low_bit), "bf16": generate(model)}, 3 if quick else 6)
    setup = f"random Llama of 1B shape, {weights}, bf16 head, greedy, {tokens} tokens after 8"
    yield rate(name, seconds, tokens, "tokens per second", setup)


@cache  # the codes do not matter for speed
def packed_of(in_features: int, out_features: int, ternary: bool) -> PackedWeight:
    packed, weight = random_packed(in_features, out_features)
    if not ternary:
        return packed
    codes = torch.randint(0, 3, weight.shape, dtype=torch.uint8)
    zero = torch.ones_like(packed.zero)
    return PackedWeight(pack_codes(codes, 2), packed.scale, zero, 2, in_features, GROUP_SIZE)


def low_bit_layer(linear: nn.Linear, ternary: bool) -> LowBitLinear:
    packed = packed_of(linear.in_features, linear.out_features, ternary)
    own = dataclasses.replace(packed, codes=packed.codes.clone())  # but each layer reads its own
    return LowBitLinear.from_packed(linear, own, zero_point=1 if ternary else None)


def factored_layer(linear: nn.Linear) -> FactoredBinaryLinear:
    shape = (linear.out_features, linear.in_features)
    layer = FactoredBinaryLinear.skeleton(linear, rank_for(*shape, FACTORED_BITS, 2), 2)
    for signs in (layer.u_signs, layer.v_signs):
        signs.random_(0, 256)
    for scale in (layer.out_scale, layer.latent_scale, layer.in_scale):
        scale.uniform_(0.01, 0.1)
    return layer


def decode_tokens(quick: bool) -> Iterator[Measure]:
    weights = f"{BITS}-bit group {GROUP_SIZE}"
    yield from decode("decode_tokens_cpu", partial(low_bit_layer, ternary=False), weights, quick)


def decode_ternary(quick: bool) -> Iterator[Measure]:
    yield from decode("catq_decode_cpu", partial(low_bit_layer, ternary=True), f"ternary group {GROUP_SIZE}", quick)


def decode_factored(quick: bool) -> Iterator[Measure]:
    yield from decode("littlebit2_decode_cpu", factored_layer, f"sign factors, {FACTORED_BITS} bits a weight", quick)


EXPERIMENTS = {
    "decode_linear_cpu": decode_linear,
    "prefill_linear_cpu": prefill_linear,
    "decode_tokens_cpu": decode_tokens,
    "catq_decode_cpu": decode_ternary,
    "littlebit2_decode_cpu": decode_factored,
}
