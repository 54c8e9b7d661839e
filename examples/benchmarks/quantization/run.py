"""Quantization: what OSAQ costs and brings on a real small model, and how fast its packed linears run on a CPU.

python examples/benchmarks/quantization/run.py [--quick] [--only NAME] [--json PATH]
"""

import sys
from pathlib import Path


sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from experiments import catq, cost, defaults, littlebit2, littlebit2_qat, perplexity, speed  # noqa: E402
from harness import run  # noqa: E402


if __name__ == "__main__":
    rooms = (perplexity, speed, cost, catq, littlebit2, littlebit2_qat)
    run(
        {name: it for room in rooms for name, it in room.EXPERIMENTS.items()},
        on_request={**defaults.EXPERIMENTS, **littlebit2_qat.ON_REQUEST},
    )
