"""Run by `accelerate launch` in `test_two_processes.py`: a short run, whose losses and weights go to a file.

python run_in_processes.py METHOD FOLDER ROWS_PER_PROCESS
"""

import json
import sys
from pathlib import Path

import torch

import hf_ext
from tests import tiny
from tests.trainers import runs


METHODS = {
    "saft": (hf_ext.SAFTTrainer, hf_ext.SAFTConfig, {"saft_scheme": "geometric"}),
    "concat": (hf_ext.RopeDistillationTrainer, hf_ext.RopeDistillationConfig, {"psd_view_mode": "concat"}),
    "shared_prefix": (
        hf_ext.RopeDistillationTrainer,
        hf_ext.RopeDistillationConfig,
        {"psd_view_mode": "shared_prefix"},
    ),
}


if __name__ == "__main__":
    method, folder, rows = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    trainer_class, config_class, settings = METHODS[method]
    shape = {"per_device_train_batch_size": rows, "max_steps": 3, "completion_only_loss": False}
    shape["train_sampling_strategy"] = "sequential"
    trainer = runs.make(folder / "run", tiny.llama(), trainer_class, config_class, **shape, **settings)
    trainer.train()
    if trainer.accelerator.is_main_process:
        keys = ("loss", "nll", "view_kl", "saft/weight_mean", "grad_norm")
        found = [{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history]
        losses = [entry for entry in found if "loss" in entry]
        processes = trainer.accelerator.num_processes
        (folder / "losses.json").write_text(json.dumps({"processes": processes, "losses": losses}))
        weights = torch.cat(
            [p.detach().flatten() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()]
        )
        torch.save(weights, folder / "weights.pt")
