"""How OSAQ's defaults were found: a search on the last third of wikitext-2-valid, which the calibration never sees.

Not part of a full run; `run.py --only osaq_defaults` repeats it.
"""

from collections.abc import Iterator

from harness import Measure

from .perplexity import PLAIN_RTN, ROW_RTN, Lab


GRID = [
    {"token_normalize": token_normalize, "gamma": gamma, "mu1": mu1}
    for token_normalize in (False, True)
    for gamma in (0.01, 0.02)
    for mu1 in (0.1, 0.3, 1.0)
]


def search(quick: bool) -> Iterator[Measure]:
    """Both wanted figures for every setting: 3-bit rounding per row, and the drift of the float model."""
    it = Lab(quick)
    cut = 2 * len(it.calibration) // 3
    it.calibration, it.test = it.calibration[:cut], it.calibration[cut:]
    it.setup = it.setup.replace("of wikitext-2-test", "of the last third of wikitext-2-valid, calibrated on the rest")
    plain = it.quantized(**PLAIN_RTN)
    for options in GRID:
        name = ",".join(f"{option}={value}" for option, value in options.items())
        yield it.measure(f"osaq_defaults_ppl/{name}", it.quantized(**ROW_RTN, **options), "RTN 3-bit per row", plain)
        yield it.measure(f"osaq_defaults_drift/{name}", it.absorbed(**options), "the float model", it.float())


EXPERIMENTS = {"osaq_defaults": search}
