"""CAT-Q on the demo model: against ternary rounding and 2-bit GPTQ, what each part of it brings, its cost."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from harness import Measure
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_ext
from hf_ext import CatQConfig
from hf_ext.core.modules import named_linears, set_linear_weight, weight_of
from hf_ext.quantizers.activations import ActivationStore, BlockInputs
from hf_ext.quantizers.blockwise import evaluating

from .perplexity import OFF, Lab
from .ternary import absmean, twn


GROUP_SIZE = 64
LIMIT_SECONDS = 1500.0
SHORT = {"num_samples": 16, "epochs": 5}
# The parts are compared on a few blocks, so that five runs are soon done.
PART_BLOCKS = 4
PARTS = {
    "catq_no_lm": {"factor_lr": 0.0},
    "catq_no_st": {"soft_ratio": 0.0},
    "catq_no_lora": {"lora_rank": 0},
    "catq_ste": {"soft_ratio": 0.0, "hard_stage": "straight_through"},
}


class TernaryLab(Lab):
    """The lab of perplexities, with CAT-Q's calibration and the float weights that every setting leaves."""

    def __init__(self, quick: bool):
        super().__init__(quick)
        self.windows = 8 if quick else 16
        self.preset = SHORT if quick else {}
        rows = self.catq_config()
        self.run_of_gptq = {"num_samples": rows.num_samples, "sequence_length": rows.sequence_length}
        self.setup = (
            f"SmolLM2-135M-Instruct fp32, group size {GROUP_SIZE}, {rows.num_samples} x {rows.sequence_length} tokens "
            f"of wikitext-2-valid, {rows.epochs} epochs, first {self.windows} windows of 1024 of wikitext-2-test"
        )
        self.weights: dict[str, dict[str, Tensor]] = {}

    def catq_config(self, **options) -> CatQConfig:
        given = {"preset": "fast", "group_size": GROUP_SIZE, **self.preset, **options}
        return CatQConfig(dataset=[self.calibration], tokenizer=self.tokenizer, **given)

    def catq(self, **options) -> float:
        def change(model: PreTrainedModel) -> None:
            hf_ext.quantize(model, self.catq_config(**options))
            model.dequantize()

        return self.perplexity(change, f"catq {sorted(options.items())}")

    def saved(self, folder: str) -> float:
        """The perplexity of a ternary model on disk."""

        def change(model: PreTrainedModel) -> PreTrainedModel:
            ternary = load(folder).dequantize()
            self.keep("catq", ternary)
            return ternary

        return self.perplexity(change, "saved")

    def rounded(self, rule: Callable[[Tensor, int], Tensor]) -> float:
        def change(model: PreTrainedModel) -> None:
            for _, linear in named_linears(model.model):
                set_linear_weight(linear, rule(weight_of(linear), GROUP_SIZE))
            self.keep(rule.__name__, model)

        return self.perplexity(change, rule.__name__)

    def keep(self, key: str, model: PreTrainedModel) -> None:
        self.weights[key] = {name: weight_of(linear).bfloat16() for name, linear in named_linears(model.model)}

    def gptq2(self) -> float:
        return self.quantized(bits=2, group_size=GROUP_SIZE, token_normalize=False, **OFF, **self.run_of_gptq)


lab = cache(TernaryLab)


def load(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def whole(quick: bool) -> Iterator[Measure]:
    """One run of the preset in a process of its own: what it costs, and how good its model is."""
    it = lab(quick)
    with tempfile.TemporaryDirectory() as folder:
        code = (
            f"import sys; sys.path[:0] = {sys.path!r}; from experiments.catq import run_once; "
            f"print(run_once({quick}, {folder!r}))"
        )
        done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
        yield from cost(it, json.loads(done.stdout.splitlines()[-1]))
        yield from against_rounding(it, it.saved(folder))
    yield from layer_errors(it)


def run_once(quick: bool, folder: str) -> str:
    """Quantize the demo model into `folder`; return seconds and bytes as JSON."""
    it = lab(quick)
    model = load(it.path)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    start = time.perf_counter()
    report = hf_ext.quantize(model, it.catq_config())
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    model.to(torch.bfloat16).save_pretrained(folder)
    report.save(Path(folder) / "report.json")
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    return json.dumps({"seconds": seconds, "peak": peak, "weights": weights, "size": size})


def cost(it: TernaryLab, run: dict[str, float]) -> Iterator[Measure]:
    setup = f"a process of its own, {torch.get_num_threads()} threads; {it.setup}"
    yield Measure("catq_seconds", run["seconds"], "seconds", "the limit", LIMIT_SECONDS, setup)
    yield Measure("catq_peak_rss_ratio", run["peak"], "bytes", "float weights", run["weights"], setup)
    yield Measure("catq_size_ratio", run["size"], "bytes", "bf16 weights", run["weights"] / 2, setup)


def against_rounding(it: TernaryLab, ours: float) -> Iterator[Measure]:
    baselines = {"absmean ternary": it.rounded(absmean), "TWN": it.rounded(twn), "GPTQ 2-bit": it.gptq2()}
    best = min(baselines, key=baselines.get)
    yield it.measure("catq_ppl", ours, f"{best}, the best of {', '.join(baselines)}", baselines[best])
    yield it.measure("catq_float_ratio_ppl", ours, "the float model", it.float())
    for name, value in baselines.items():
        yield it.measure(f"ternary_baseline_ppl/{name.replace(' ', '_')}", value, "the float model", it.float())


def layer_errors(it: TernaryLab) -> Iterator[Measure]:
    """Relative output error of every decoder block, and of every linear, on float inputs of held-out text."""
    for level, errors in (("block", block_errors(it)), ("linear", linear_errors(it))):
        ours, baseline = torch.tensor(errors["catq"]), torch.tensor(errors["absmean"])
        share = (ours < baseline).float().mean().item()
        setup = f"{len(ours)} {level}s, {share:.0%} of them improved, float inputs, 4 x 512 tokens; {it.setup}"
        name = f"catq_layer_error/{level}"
        yield Measure(name, ours.mean().item(), "relative error", "absmean ternary", baseline.mean().item(), setup)


def held_out(it: TernaryLab) -> Tensor:
    return it.tokenizer(it.test, return_tensors="pt")["input_ids"][0, : 4 * 512].view(4, 512)


def block_errors(it: TernaryLab) -> dict[str, list[float]]:
    """What each block adds to its input, with other weights, against what the float block adds."""
    model = load(it.path)
    linears = dict(named_linears(model.model))
    floats = {name: weight_of(linear).clone() for name, linear in linears.items()}
    errors: dict[str, list[float]] = {"catq": [], "absmean": []}
    with torch.no_grad(), evaluating(model), ActivationStore(None) as store:
        inputs = BlockInputs(model, model.model.layers, [held_out(it)], store)
        for index in range(len(inputs.blocks)):
            start, exact = store[0], inputs.run(0, index + 1)
            names = [name for name in linears if name.startswith(f"layers.{index}.")]
            for key in errors:
                for name in names:
                    set_linear_weight(linears[name], it.weights[key][name].float())
                difference = inputs.run(0, index + 1) - exact
                errors[key].append((difference.norm() / (exact - start).norm()).item())
            for name in names:
                set_linear_weight(linears[name], floats[name])
            inputs.advance(rerun=True)
    return errors


def linear_errors(it: TernaryLab) -> dict[str, list[float]]:
    model = load(it.path)
    errors: dict[str, list[float]] = {"catq": [], "absmean": []}

    def watch(name: str) -> Callable:
        def compare(linear, args, output) -> None:
            for key, found in errors.items():
                changed = torch.nn.functional.linear(args[0], it.weights[key][name].float(), linear.bias)
                found.append(((changed - output).norm() / output.norm()).item())

        return compare

    handles = [linear.register_forward_hook(watch(name)) for name, linear in named_linears(model.model)]
    with torch.no_grad():
        model(held_out(it))
    for handle in handles:
        handle.remove()
    return errors


def parts(quick: bool) -> Iterator[Measure]:
    """Perplexity without one part, against all of them; a ratio above 1 says that the part helps."""
    it = lab(True)
    rest = {"modules_to_not_convert": [f"model.layers.{index}" for index in range(PART_BLOCKS, 30)]}
    complete = it.catq(**rest)
    for name, options in PARTS.items():
        measure = it.measure(name, it.catq(**rest, **options), "CAT-Q complete, same budget", complete)
        measure.setup = f"first {PART_BLOCKS} blocks ternary, the others float; {measure.setup}"
        yield measure


EXPERIMENTS = {"catq_ppl": whole, "catq_parts": parts}
