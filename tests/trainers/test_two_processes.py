"""Two processes on a CPU (gloo) give the losses and weights of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainers.run_in_processes import METHODS


ROOT = Path(__file__).parents[2]
# The flag starts processes that talk to each other, here without a GPU; `--cpu` would start one.
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--mixed_precision", "no"]


def losses_and_weights(method: str, processes: int, folder: Path) -> tuple[list[dict[str, float]], torch.Tensor]:
    folder.mkdir()
    flags = {"dynamo_backend": "no", "num_machines": 1, "num_processes": processes, "main_process_port": 0}
    launch = [*LAUNCH, *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
    command = [*(launch if processes > 1 else [sys.executable]), "-m", "tests.trainers.run_in_processes"]
    arguments = [method, str(folder), str(4 // processes)]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "losses.json").read_text())
    assert found["processes"] == processes
    return found["losses"], torch.load(folder / "weights.pt")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_are_one(method, tmp_path):
    (one, weights), (two, of_two) = (losses_and_weights(method, n, tmp_path / f"{n}") for n in (1, 2))
    assert len(one) == len(two) == 3
    for alone, together in zip(one, two, strict=True):
        assert together == pytest.approx(alone, rel=1e-5)
    assert (of_two - weights).abs().max() <= 1e-5
