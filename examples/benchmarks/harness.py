"""What every benchmark here shares: the form of a measure, fair timing of two sides, and the command line."""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


PACKAGES = ("hf_ext", "torch", "transformers", "accelerate", "datasets", "peft", "hqq")
# Costs are better small, everything else is a rate and better large.
COST_SUFFIXES = ("_time", "_seconds", "_memory", "_overhead", "_ppl", "_error", "_drift", "_rss_ratio")


@dataclass
class Measure:
    """One figure beside its baseline. `ratio` is `value / baseline_value`; `spread` is over the repeats or seeds."""

    name: str
    value: float
    unit: str
    baseline: str
    baseline_value: float
    setup: str
    seeds: int = 1
    spread: float | None = None

    def to_dict(self) -> dict:
        cost = self.name.partition("/")[0].endswith(COST_SUFFIXES)
        return {**asdict(self), "ratio": self.value / self.baseline_value, "higher_is_better": not cost}


Experiment = Callable[[bool], Iterable[Measure]]


def data_file(name: str) -> Path:
    """A file of the benchmark data; ends the run, saying so, where the folder is absent."""
    folder = Path(os.environ.get("HF_EXT_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not (folder / name).exists():
        raise SystemExit(f"skipped: {folder / name} is absent; set HF_EXT_DATA to a folder that holds {name}.")
    return folder / name


def alternate(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every call, the sides taking turns so that a busy machine slows all of them alike."""
    for side in sides.values():
        side()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def rate(name: str, seconds: dict[str, list[float]], units: float, unit: str, setup: str) -> Measure:
    """A speed as units per second, from the medians of `alternate`'s two sides: ours first, the baseline second."""
    ours, baseline = seconds
    values = [units / statistics.median(seconds[side]) for side in (ours, baseline)]
    ratios = [slow / fast for fast, slow in zip(seconds[ours], seconds[baseline], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return Measure(name, values[0], unit, baseline, values[1], setup, spread=quartiles[2] - quartiles[0])


def run(experiments: dict[str, Experiment], on_request: dict[str, Experiment]) -> None:
    """Command line of a benchmark: `--quick`, `--only NAME`, `--json PATH`. `on_request` runs only by name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="at most ten minutes a measure on two cores")
    parser.add_argument("--only", choices=[*experiments, *on_request], help="one group of measures")
    parser.add_argument("--json", type=Path, help="where the result file goes")
    arguments = parser.parse_args()
    measures = []
    others = kept(arguments.json) if arguments.only and arguments.json else []
    chosen = {arguments.only: (experiments | on_request)[arguments.only]} if arguments.only else experiments
    for experiment in chosen.values():
        for measure in experiment(arguments.quick):
            measures.append(measure.to_dict())
            print(line(measures[-1]), flush=True)
            if arguments.json:
                new = {found["name"] for found in measures}
                write(arguments.json, [old for old in others if old["name"] not in new] + measures, arguments.quick)


def kept(path: Path) -> list[dict]:
    """The measures of a result file: a run of one group replaces its own and leaves the others."""
    return json.loads(path.read_text(encoding="utf-8"))["measures"] if path.exists() else []


def line(measure: dict) -> str:
    better = "higher" if measure["higher_is_better"] else "lower"
    return (
        f"{measure['name']}: {measure['value']:.4g} {measure['unit']}, {measure['baseline']} "
        f"{measure['baseline_value']:.4g}, ratio {measure['ratio']:.3f} ({better} is better)"
    )


def write(path: Path, measures: list[dict], quick: bool) -> None:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine = {"python": platform.python_version(), "machine": platform.machine(), "threads": torch.get_num_threads()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"measures": measures, "versions": versions, "run": {"quick": quick, **machine}}, indent=1)
    )
