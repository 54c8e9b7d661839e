"""`hf-ext quantize` saves a checkpoint that loads, and saves it whole or not at all."""

import errno
import json
import signal
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_ext
from tests.numerics import assert_matches


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_saves_all_that_a_checkpoint_needs(run, quantize_arguments, out, tiny_tokenizer):
    result = run(*quantize_arguments, "--bits", 4, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["quantization_config"]["bits"] == 4
    assert data["quantization_config"]["group_size"] == 16
    assert data["layers"] == {"quantized": 14, "skipped": 1}
    assert data["quantized_bytes"] == (out / "model.safetensors").stat().st_size
    assert AutoTokenizer.from_pretrained(out).chat_template == tiny_tokenizer.chat_template
    assert GenerationConfig.from_pretrained(out).eos_token_id == 2
    report = json.loads((out / "quantization_report.json").read_text())
    assert sum(layer["status"] == "quantized" for layer in report["layers"]) == 14
    assert ModelCard.load(out / "README.md").data.tags == ["hf_ext", "osaq", "4-bit"]


def test_is_the_model_that_the_library_makes(run, quantize_arguments, out, model_folder, text_file, tiny_tokenizer):
    assert run(*quantize_arguments, "--rounding", "rtn", "--option", "gamma=0.02").exit_code == 0
    config = hf_ext.OSAQConfig(
        group_size=16,
        rounding="rtn",
        gamma=0.02,
        dataset=str(text_file),
        tokenizer=tiny_tokenizer,
        num_samples=4,
        sequence_length=32,
    )
    expected = AutoModelForCausalLM.from_pretrained(model_folder, quantization_config=config)
    input_ids = torch.arange(4, 24)[None]
    with torch.no_grad():
        actual = AutoModelForCausalLM.from_pretrained(out)(input_ids).logits
        assert_matches(actual, expected(input_ids).logits, "exact")


def test_float_bytes_are_those_of_the_float_checkpoint(run, quantize_arguments, model_folder, tiny_llama):
    data = json.loads(run(*quantize_arguments, "--json").stdout)
    assert data["float_bytes"] == sum(4 * parameter.numel() for parameter in tiny_llama.parameters())


def test_evaluates_afterwards(run, quantize_arguments, out, text_file):
    assert run(*quantize_arguments).exit_code == 0
    result = run("eval", out, "--perplexity", text_file, "--sequence-length", 32, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["perplexity"] > 1


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=["disk-full", "interrupt"]
)
def test_failing_save_leaves_the_old_checkpoint(run, quantize_arguments, out, tmp_path, monkeypatch, error):
    assert run(*quantize_arguments).exit_code == 0
    before = contents(out)

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fail)
    result = run(*quantize_arguments, "--overwrite", "--bits", 2)
    assert result.exit_code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert ("Interrupted" if isinstance(error, KeyboardInterrupt) else "No space left") in result.stderr
    assert "Traceback" not in result.stderr
    assert contents(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "text.txt"]


def test_overwrite_replaces_a_model_and_nothing_else(run, quantize_arguments, out):
    out.mkdir()
    (out / "thesis.tex").touch()
    assert "is not empty" in run(*quantize_arguments).stderr
    result = run(*quantize_arguments, "--overwrite")
    assert (result.exit_code, "holds no saved model" in result.stderr) == (2, True)
    (out / "config.json").touch()
    assert run(*quantize_arguments, "--overwrite").exit_code == 0
    assert not (out / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "osak"], "Did you mean 'osaq'?"),
        (["--bits", 5], "bits=5"),
        (["--rounding", "gptqq"], "Did you mean 'gptq'?"),
        (["--option", "gama=0.1"], "Did you mean 'gamma'?"),
        (["--option", "gamma"], "no key=value"),
        (["--option", "gamma=2"], "gamma=2"),
        (["--calibration", "absent.txt"], "no such file: 'absent.txt'"),
        (["--dtype", "int8"], "--dtype"),
        (["--output", "."], "--output"),
        (["--method", "catq", "--preset", "quick"], "Available: fast, paper"),
        (["--method", "catq", "--bits", 2], "CatQConfig has no option 'bits'"),
        (["--method", "littlebit2"], "has no option"),
    ],
)
def test_wrong_options_are_usage_errors(run, quantize_arguments, out, options, message):
    result = run(*quantize_arguments, *options)
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.stderr
    assert not out.exists()


SHORT = ["--preset", "fast", "--group-size", 16, "--option", "epochs=1", "--sequence-length", 32]


@pytest.mark.parametrize(
    ("method", "label"),
    [
        (["catq", *SHORT, "--calibration"], "ternary"),
        (["littlebit2", "--bits", 1], "1-bit"),
        (["littlebit2", "--bits", 0.9], "0.9-bit"),
    ],
)
def test_every_method_has_its_options_here(run, model_folder, text_file, out, method, label):
    arguments = ["quantize", model_folder, "--output", out, "--method", *method]
    result = run(*arguments, *([text_file] if arguments[-1] == "--calibration" else []), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["layers"] == {"quantized": 14, "skipped": 1}
    assert ModelCard.load(out / "README.md").data.tags == ["hf_ext", method[0], label]
    assert torch.isfinite(AutoModelForCausalLM.from_pretrained(out)(torch.arange(4, 24)[None]).logits).all()


def test_released_parameters_take_no_data(run, model_folder, tmp_path, out):
    arguments = ["--method", "catq", "--group-size", 16, "--option", f"parameters={tmp_path / 'absent.pth'}"]
    result = run("quantize", model_folder, "--output", out, *arguments)
    assert result.exit_code == 1 and "no such file" in result.stderr
    assert not out.exists()


def test_data_is_asked_for_where_it_is_needed_and_refused_where_it_is_not(run, model_folder, text_file, out):
    result = run("quantize", model_folder, "--output", out, "--method", "catq")
    assert result.exit_code == 2 and "give --calibration" in result.stderr
    result = run("quantize", model_folder, "--output", out, "--method", "littlebit2", "--calibration", text_file)
    assert result.exit_code == 2 and "reads no data" in result.stderr
    assert not out.exists()


def test_what_is_read_or_kept_must_not_lie_in_the_output(run, model_folder, text_file, tmp_path):
    """--overwrite replaces the folder as a whole."""
    arguments = ["--sequence-length", 32, "--group-size", 16, "--overwrite"]
    inner = tmp_path / "text.txt"
    for paths in (
        [model_folder, "--output", model_folder, "--calibration", text_file],
        [model_folder, "--output", tmp_path, "--calibration", inner],
        [
            model_folder,
            "--output",
            tmp_path / "out",
            "--calibration",
            inner,
            "--checkpoint-dir",
            tmp_path / "out" / "c",
        ],
    ):
        result = run("quantize", *paths, *arguments)
        assert result.exit_code == 2 and "--output" in result.stderr, result.stderr
    assert (model_folder / "model.safetensors").exists() and text_file.exists()


def test_quantized_model_is_refused(run, quantize_arguments, out, text_file, tmp_path):
    assert run(*quantize_arguments).exit_code == 0
    result = run("quantize", out, "--calibration", text_file, "--output", tmp_path / "again")
    assert result.exit_code == 2
    assert "quantized already" in result.stderr


def test_folder_that_cannot_be_written_is_found_before_the_work(run, quantize_arguments, tmp_path):
    result = run(*quantize_arguments, "--output", tmp_path / "text.txt" / "out")
    assert result.exit_code == 2
    assert "cannot write" in result.stderr


def test_finished_blocks_are_not_done_again(run, quantize_arguments, out, tmp_path):
    blocks = tmp_path / "blocks"
    assert run(*quantize_arguments, "--checkpoint-dir", blocks).exit_code == 0
    expected = (out / "model.safetensors").read_bytes()
    last = sorted(blocks.glob("block-*"))[-1]
    kept = {path.name: path.stat().st_mtime_ns for path in blocks.iterdir() if path != last}
    last.unlink()
    assert run(*quantize_arguments, "--checkpoint-dir", blocks, "--overwrite").exit_code == 0
    assert last.exists()
    assert {path.name: path.stat().st_mtime_ns for path in blocks.iterdir() if path != last} == kept
    assert (out / "model.safetensors").read_bytes() == expected


@pytest.mark.slow
def test_ctrl_c_in_a_real_process(quantize_arguments, out, tmp_path):
    arguments = [*quantize_arguments, "--num-samples", 10**5, "--sequence-length", 2, "--batch-size", 1]
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 " * 50_000)
    command = [sys.executable, "-m", "hf_ext.cli.main", *map(str, arguments), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "Quantizing" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Interrupted" in json.loads(stdout)["error"]
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]
