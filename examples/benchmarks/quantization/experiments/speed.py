"""Speed of packed linears on a CPU against bf16, at the shapes of a 7B model, and of a whole 1B-shaped model."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from harness import Measure, alternate, rate
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ext import LowBitLinear
from hf_ext.core.modules import named_linears, replace_module
from hf_ext.ops.cpu_kernels import prepare_cpu
from hf_ext.ops.low_bit_linear import low_bit_linear
from hf_ext.ops.packed_weight import PackedWeight
from hf_ext.ops.packing import pack_codes
from hf_ext.quantizers.rounding import min_max_grid, round_to_grid


BITS, GROUP_SIZE = 4, 128
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


def decode_tokens(quick: bool) -> Iterator[Measure]:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    low_bit = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    packed = {}
    for name, module in list(named_linears(low_bit.model)):
        shape = (module.in_features, module.out_features)
        if shape not in packed:  # the codes do not matter for speed, but each layer reads its own
            packed[shape] = random_packed(*shape)[0]
        own = packed[shape]
        own = PackedWeight(own.codes.clone(), own.scale, own.zero, own.bits, own.in_features, own.group_size)
        replace_module(low_bit.model, name, LowBitLinear.from_packed(module, own))
    tokens = 64
    prompt = torch.randint(0, config.vocab_size, (1, 8))

    def decode(decoder: LlamaForCausalLM):
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return lambda: decoder.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

    seconds = alternate({"ours": decode(low_bit), "bf16": decode(model)}, 3 if quick else 6)
    setup = f"random Llama of 1B shape, {BITS}-bit group {GROUP_SIZE}, bf16 head, greedy, {tokens} tokens after 8"
    yield rate("decode_tokens_cpu", seconds, tokens, "tokens per second", setup)


EXPERIMENTS = {
    "decode_linear_cpu": decode_linear,
    "prefill_linear_cpu": prefill_linear,
    "decode_tokens_cpu": decode_tokens,
}
