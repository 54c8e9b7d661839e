"""LittleBit-2 before any training: what its rotation brings on real weights and on spectra, and its exact size."""

import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import torch
from harness import Measure, data_file
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_ext
from hf_ext import LittleBit2Config
from hf_ext.core.modules import named_linears, weight_of
from hf_ext.quantizers.littlebit2.functional import factorize, rank_for


BITS = (1.0, 0.55, 0.3, 0.1)
LAYER_BITS = 0.55
DECAYS = (0.1, 0.25, 0.5, 0.75, 1.0)
ROTATIONS = ("joint_itq", "random", "none")
NO_ROTATION = "LittleBit's start, no rotation"


@cache
def demo() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(hf_ext.demo_model(), dtype=torch.float32)


def blocks(quick: bool) -> list[tuple[str, Tensor]]:
    """The weights of all decoder linears, or of every tenth block's."""
    linears = [(name, weight_of(linear)) for name, linear in named_linears(demo().model)]
    return [(name, weight) for name, weight in linears if not quick or int(name.split(".")[1]) % 10 == 0]


@torch.no_grad()
def start(weight: Tensor, bits: float, rotation: str, seed: int = 0) -> Tensor:
    """The dense weight of an untrained start at `bits` bits a weight, both paths."""
    generator = torch.Generator().manual_seed(seed)
    paths = factorize(weight, rank_for(*weight.shape, bits, 2), rotation=rotation, generator=generator)
    return sum(path.to_dense() for path in paths)


def tiny_rank(weight: Tensor, bits: float) -> Tensor:
    """The best approximation by two fp16 factors of `bits` bits a weight."""
    out_features, in_features = weight.shape
    rank = max(1, int(bits * weight.numel() / (16 * (out_features + in_features))))
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


def relative(approximation: Tensor, weight: Tensor) -> float:
    return ((approximation - weight).norm() / weight.norm()).item()


def weight_errors(quick: bool) -> Iterator[Measure]:
    """Relative error of the weights, mean over the linears; for one width the errors of the outputs, too."""
    linears = blocks(quick)
    for bits in BITS:
        starts: dict[str, Callable[[Tensor], Tensor]] = {
            rotation: partial(start, bits=bits, rotation=rotation) for rotation in ROTATIONS
        }
        starts["fp16"] = partial(tiny_rank, bits=bits)
        found: dict[str, list[float]] = {name: [] for name in starts}
        for _, weight in linears:
            for name, approximate in starts.items():
                found[name].append(relative(approximate(weight), weight))
        mean = {name: sum(values) / len(values) for name, values in found.items()}
        better = sum(a < b for a, b in zip(found["joint_itq"], found["none"], strict=True)) / len(linears)
        setup = f"SmolLM2-135M-Instruct, {len(linears)} linears, {better:.0%} of them improved, two paths"
        measure = partial(Measure, unit="relative error", setup=setup)
        name = f"littlebit2_error/{bits}"
        yield measure(name, mean["joint_itq"], baseline=NO_ROTATION, baseline_value=mean["none"])
        yield measure(f"{name}/random", mean["random"], baseline=NO_ROTATION, baseline_value=mean["none"])
        fp16 = "a low-rank product in fp16 of equal size"
        yield measure(f"{name}/fp16", mean["joint_itq"], baseline=fp16, baseline_value=mean["fp16"])


def output_errors(quick: bool) -> Iterator[Measure]:
    """Relative error of every linear's output on held-out text."""
    model = demo()
    tokenizer = AutoTokenizer.from_pretrained(hf_ext.demo_model())
    text = data_file("wikitext-2-test.txt").read_text(encoding="utf-8")
    tokens = tokenizer(text, return_tensors="pt")["input_ids"][0, : 4 * 512].view(4, 512)
    inputs: dict[str, Tensor] = {}
    wanted = dict(blocks(quick))

    def keep(name: str) -> Callable:
        return lambda linear, args: inputs.update({name: args[0].flatten(0, 1)})

    linears = {name: linear for name, linear in named_linears(model.model) if name in wanted}
    handles = [linear.register_forward_pre_hook(keep(name)) for name, linear in linears.items()]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    pairs = []
    for name, weight in wanted.items():
        exact = inputs[name] @ weight.T
        pairs.append([relative(inputs[name] @ start(weight, LAYER_BITS, r).T, exact) for r in ("joint_itq", "none")])
    ours, baseline = torch.tensor(pairs).unbind(1)
    share = (ours < baseline).float().mean().item()
    setup = (
        f"SmolLM2-135M-Instruct, {len(pairs)} linears, {share:.0%} of them improved, {LAYER_BITS} bits, 4 x 512 tokens"
    )
    yield Measure(
        "littlebit2_layer_error", ours.mean().item(), "relative error", NO_ROTATION, baseline.mean().item(), setup
    )


def spectral_gain(quick: bool) -> Iterator[Measure]:
    """Spectra that fall as `k^-decay`: where sign factors of 1 bit beat fp16 factors of equal size, and where not."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(512, 512, generator=generator))[0] for _ in range(2))
    for decay in DECAYS:
        weight = (left * torch.arange(1.0, 513.0) ** -decay) @ right.T
        fp16 = relative(tiny_rank(weight, 1.0), weight)
        for suffix, rotation in (("", "joint_itq"), ("/no_rotation", "none")):
            errors = [relative(start(weight, 1.0, rotation, seed), weight) for seed in range(3)]
            yield Measure(
                f"spectral_gain/{decay}{suffix}",
                fp16,
                "relative error of fp16 factors",
                f"sign factors of equal size, rotation {rotation}",
                sum(errors) / 3,
                f"512 x 512, singular values k^-{decay}, 1 bit a weight; above 1 the signs win",
                seeds=3,
                spread=max(errors) - min(errors),
            )


def stored_bits(quick: bool) -> Iterator[Measure]:
    """Bits a weight of the quantized linears in the file, against those that the report promises."""
    for bits in BITS:
        model = AutoModelForCausalLM.from_pretrained(hf_ext.demo_model(), dtype=torch.float32)
        report = hf_ext.quantize(model, LittleBit2Config(bits=bits, itq_iterations=0))
        done = [layer for layer in report.layers if layer.status == "quantized"]
        weights = sum(layer.shape[0] * layer.shape[1] for layer in done)
        promised = sum(layer.shape[0] * layer.shape[1] * layer.metrics["bits_per_weight"] for layer in done) / weights
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            tensors = load_file(Path(folder) / "model.safetensors")
        names = {layer.name for layer in done}
        stored = 8 * sum(t.nbytes for name, t in tensors.items() if name.rpartition(".")[0] in names) / weights
        total = 8 * sum(t.nbytes for t in tensors.values()) / sum(p.numel() for p in demo().parameters())
        setup = f"SmolLM2-135M-Instruct, {len(done)} linears; the whole file takes {total:.2f} bits a parameter"
        yield Measure(f"littlebit2_bpp_error/{bits}", stored, "bits a weight", "the report", promised, setup)


EXPERIMENTS = {
    "littlebit2_error": weight_errors,
    "littlebit2_layer_error": output_errors,
    "spectral_gain": spectral_gain,
    "littlebit2_bpp_error": stored_bits,
}
