"""`hf-ext train`: the flags of TRL's scripts reach a real run."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_ext.cli.train import METHODS
from tests.trainers import runs


@pytest.fixture
def train_arguments(model_folder, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("\n".join(json.dumps(row) for row in runs.prompts()))
    flags = {
        "model_name_or_path": model_folder,
        "dataset_name": data,
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "report_to": "none",
        "bf16": "false",
    }
    return ["saft", *(word for name, value in flags.items() for word in (f"--{name}", value)), "--use_cpu"]


def test_it_trains_and_saves(run, train_arguments, model_folder, tmp_path):
    result = run("train", *train_arguments, "--saft_scheme", "linear", "--learning_rate", "0.1")
    assert result.exit_code == 0, result.output
    before, after = (AutoModelForCausalLM.from_pretrained(it) for it in (model_folder, tmp_path / "out"))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    saved = torch.load(tmp_path / "out" / "training_args.bin", weights_only=False)
    assert (saved.saft_scheme, saved.max_steps) == ("linear", 2)


def test_peft_by_flags(run, train_arguments, tmp_path):
    result = run("train", *train_arguments, "--use_peft", "--lora_target_modules", "all-linear", "--lora_r", "2")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--saft_gamma", "2"], "saft_gamma=2.0 is outside of its range, 0 to 1"),
        (["--safd_gamma", "2"], "--safd_gamma"),
        (["--loss_type", "dft"], "saft_scheme='dft'"),
    ],
)
def test_bad_values_are_usage_errors(run, train_arguments, change, message, tmp_path):
    result = run("train", *train_arguments, *change)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr and not (tmp_path / "out").exists()


def test_what_is_missing_is_named(run, train_arguments, tmp_path):
    assert "Did you mean 'saft'?" in run("train", "safd").stderr
    for flag in ("--model_name_or_path", "--dataset_name"):
        place = train_arguments.index(flag)
        result = run("train", *train_arguments[:place], *train_arguments[place + 2 :])
        assert result.exit_code == 2 and f"{flag} is missing" in result.stderr


@pytest.mark.parametrize("method", METHODS)
def test_help_lists_the_flags_of_the_method(run, method):
    result = run("train", method, "--", "--help")
    assert result.exit_code == 0
    assert ("--saft_gamma" in result.output) == (method == "saft") and "--dataset_name" in result.output
    assert "--lora_r" in result.output
