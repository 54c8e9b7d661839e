"""A tiny model saved to a folder, a text for it, and the command run in this process."""

import random

import pytest
from typer.testing import CliRunner

from hf_ext.cli.main import app


@pytest.fixture
def model_folder(tiny_llama, tiny_tokenizer, tmp_path):
    folder = tmp_path / "model"
    tiny_llama.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def text_file(tmp_path):
    generator = random.Random(0)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{generator.randrange(56)}" for _ in range(600)))
    return path


@pytest.fixture
def run():
    """A function from command-line arguments to the result: `exit_code`, `stdout`, `stderr`."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def quantize_arguments(model_folder, text_file, tmp_path):
    """A run that takes a fraction of a second; tests add to it, and the last of an option wins."""
    arguments = ["quantize", model_folder, "--calibration", text_file, "--output", tmp_path / "out"]
    return [*arguments, "--sequence-length", 32, "--num-samples", 4, "--group-size", 16]
