"""Perplexity of the demo model on WikiText-2 test, calibrated on WikiText-2 valid.

Its weights come from a 4-bit file, which flatters every 4-bit result: only 3 bits and below are measured.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import cache

import torch
from harness import Measure, data_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TorchAoConfig

import hf_ext
from hf_ext import OSAQConfig
from hf_ext.core.modules import named_linears, set_linear_weight, weight_of
from hf_ext.quantizers.base import run_on_float_model

from .magr import MagRMethod


OFF = {"max_null_ratio": 0.0}  # OSAQ's null setting: what is left is plain rounding
ROW_RTN = {"bits": 3, "group_size": -1, "rounding": "rtn"}
PLAIN_RTN = {**ROW_RTN, **OFF, "num_samples": 1}  # needs no statistics
SEQUENCE_LENGTH = 1024


class Lab:
    """The model and the data of one run, and the perplexity of every setting asked for, computed once."""

    def __init__(self, quick: bool):
        self.samples, self.windows = (8, 8) if quick else (64, 16)
        self.path = hf_ext.demo_model()
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.calibration = data_file("wikitext-2-valid.txt").read_text(encoding="utf-8")
        self.test = data_file("wikitext-2-test.txt").read_text(encoding="utf-8")
        self.setup = (
            f"SmolLM2-135M-Instruct fp32, {self.samples} x {SEQUENCE_LENGTH} tokens of wikitext-2-valid, first "
            f"{self.windows} windows of {SEQUENCE_LENGTH} of wikitext-2-test"
        )
        self._known: dict[str, float] = {}

    def config(self, **options) -> OSAQConfig:
        run = {"num_samples": self.samples, "sequence_length": SEQUENCE_LENGTH, "batch_size": 4}
        return OSAQConfig(dataset=[self.calibration], tokenizer=self.tokenizer, **(run | options))

    def perplexity(self, change: Callable[[PreTrainedModel], PreTrainedModel | None], key: str) -> float:
        """Perplexity of the model after `change`, or of the model it returns, remembered under `key`."""
        if key not in self._known:
            model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
            model = change(model) or model
            self._known[key] = hf_ext.perplexity(
                model, self.tokenizer, self.test, sequence_length=SEQUENCE_LENGTH, max_windows=self.windows
            )
        return self._known[key]

    def float(self) -> float:
        return self.perplexity(lambda model: None, "float")

    def quantized(self, **options) -> float:
        def change(model: PreTrainedModel) -> None:
            hf_ext.quantize(model, self.config(**options))
            model.dequantize()

        return self.perplexity(change, f"quantized {sorted(options.items())}")

    def absorbed(self, **options) -> float:
        def change(model: PreTrainedModel) -> None:
            hf_ext.absorb_outliers(model, self.config(**options))

        return self.perplexity(change, f"absorbed {sorted(options.items())}")

    def torchao(self, absorb: bool) -> float:
        """Transformers' own torchao config, 3 bits a row, on the saved model with or without its outliers."""
        from torchao.quantization import IntxWeightOnlyConfig
        from torchao.quantization.granularity import PerAxis

        def change(model: PreTrainedModel) -> PreTrainedModel:
            if absorb:
                hf_ext.absorb_outliers(model, self.config())
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                config = TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=PerAxis(0)))
                return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)

        return self.perplexity(change, f"torchao {absorb}")

    def magr(self, **options) -> float:
        def change(model: PreTrainedModel) -> None:
            config = self.config(**options)
            run_on_float_model(model, config, MagRMethod(config))

        return self.perplexity(change, f"magr {sorted(options.items())}")

    def hqq(self, bits: int, group_size: int) -> float:
        """HQQ, the outside peer: no calibration data, its own solver, weights restored to float for the measure."""
        from hqq.core.quantize import Quantizer

        def change(model: PreTrainedModel) -> None:
            for _, linear in named_linears(model.model):
                codes, meta = Quantizer.quantize(
                    weight_of(linear),
                    nbits=bits,
                    group_size=group_size,
                    axis=1,
                    device="cpu",
                    compute_dtype=torch.float32,
                )
                set_linear_weight(linear, Quantizer.dequantize(codes, meta))

        return self.perplexity(change, f"hqq {bits} {group_size}")

    def measure(self, name: str, value: float, baseline: str, baseline_value: float) -> Measure:
        return Measure(name, value, "perplexity", baseline, baseline_value, self.setup)


lab = cache(Lab)


def against_rtn(quick: bool) -> Iterator[Measure]:
    it = lab(quick)
    ours, plain = it.quantized(**ROW_RTN), it.quantized(**PLAIN_RTN)
    yield it.measure("osaq_rtn3_row_ppl", ours, "RTN 3-bit per row", plain)


def float_drift(quick: bool) -> Iterator[Measure]:
    it = lab(quick)
    yield it.measure("osaq_fp_drift", it.absorbed(), "the float model before absorption", it.float())


def against_gptq3(quick: bool) -> Iterator[Measure]:
    """Against GPTQ with the same token-normalised statistics, and against GPTQ as it is published."""
    it, row = lab(quick), {"bits": 3, "group_size": -1}
    ours = it.quantized(**row)
    yield it.measure("osaq_gptq3_row_ppl", ours, "GPTQ 3-bit per row, same statistics", it.quantized(**row, **OFF))
    published = it.quantized(**row, **OFF, token_normalize=False)
    yield it.measure("osaq_gptq3_row_ppl/published", ours, "GPTQ 3-bit per row, its own statistics", published)


def against_gptq2(quick: bool) -> Iterator[Measure]:
    it, group = lab(quick), {"bits": 2, "group_size": 64}
    plain, ours = it.quantized(**group, **OFF), it.quantized(**group)
    yield it.measure("osaq_gptq2_g64_ppl", ours, "GPTQ 2-bit g64", plain)
    refined = it.quantized(**group, refine_sweeps=10)
    yield it.measure("osaq_gptq2_g64_ppl/refined", refined, "GPTQ 2-bit g64", plain)


def at_groups_of_64(quick: bool) -> Iterator[Measure]:
    it, group = lab(quick), {"bits": 3, "group_size": 64}
    ours, plain = it.quantized(**group), it.quantized(**group, **OFF)
    yield it.measure("osaq_g64_ppl", ours, "GPTQ 3-bit g64", plain)
    hqq = it.hqq(3, 64)
    yield it.measure("hqq_ppl", hqq, "OSAQ + GPTQ 3-bit g64", ours)
    magr = it.magr(**group)
    yield it.measure("osaq_g64_ppl/magr", ours, "MagR + GPTQ 3-bit g64", magr)
    yield it.measure("magr_g64_ppl", magr, "GPTQ 3-bit g64", plain)


def in_front_of_torchao(quick: bool) -> Iterator[Measure]:
    it = lab(quick)
    baseline = "torchao 3-bit per row through TorchAoConfig"
    yield it.measure("osaq_torchao3_row_ppl", it.torchao(True), baseline, it.torchao(False))


EXPERIMENTS = {
    "osaq_rtn3_row_ppl": against_rtn,
    "osaq_fp_drift": float_drift,
    "osaq_gptq3_row_ppl": against_gptq3,
    "osaq_gptq2_g64_ppl": against_gptq2,
    "osaq_g64_ppl": at_groups_of_64,
    "osaq_torchao3_row_ppl": in_front_of_torchao,
}
