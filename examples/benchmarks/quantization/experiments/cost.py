"""What quantizing the demo model takes: seconds and peak memory, in a process of its own."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from harness import Measure


LIMIT_SECONDS = 600.0


def quantize_once(quick: bool) -> dict[str, float]:
    """Load the demo model in fp32 and quantize it; returns seconds, peak memory and the bytes of the float weights."""
    from transformers import AutoModelForCausalLM

    import hf_ext

    from .perplexity import lab

    it = lab(quick)
    model = AutoModelForCausalLM.from_pretrained(it.path, dtype=torch.float32)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    start = time.perf_counter()
    hf_ext.quantize(model, it.config(bits=3, group_size=-1))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak": peak, "weights": weights}


def in_a_process(quick: bool) -> dict[str, float]:
    code = (
        f"import sys, json; sys.path[:0] = {sys.path!r}; from experiments.cost import quantize_once; "
        f"print(json.dumps(quantize_once({quick})))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def cost(quick: bool) -> Iterator[Measure]:
    ours = in_a_process(quick)
    setup = (
        f"SmolLM2-135M-Instruct fp32, 3-bit per row, {16 if quick else 64} x 1024 tokens, OSAQ + GPTQ, a fresh process"
    )
    yield Measure("quantize_seconds", ours["seconds"], "seconds", "the limit", LIMIT_SECONDS, setup)
    yield Measure("peak_rss_ratio", ours["peak"], "bytes", "float weights", ours["weights"], setup)


EXPERIMENTS = {"quantize_seconds": cost}
