"""`hf-ext eval` prints what `hf_ext.perplexity` returns."""

import json

import pytest

import hf_ext


def test_prints_the_perplexity_of_the_library(run, model_folder, text_file, tiny_llama, tiny_tokenizer):
    options = {"sequence_length": 32, "max_windows": 5}
    expected = hf_ext.perplexity(tiny_llama, tiny_tokenizer, text_file.read_text(), **options)
    arguments = ["eval", model_folder, "--perplexity", text_file, "--sequence-length", 32, "--max-windows", 5]
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["perplexity"] == expected
    assert f"{expected:.3f}" in run(*arguments).stdout


def test_dtype_is_that_of_the_model_unless_asked(run, model_folder, text_file):
    arguments = ["eval", model_folder, "--perplexity", text_file, "--sequence-length", 32, "--json"]
    assert json.loads(run(*arguments).stdout)["dtype"] == "float32"
    assert json.loads(run(*arguments, "--dtype", "bfloat16").stdout)["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sequence-length", 129], "the model has 128 positions"),
        (["--sequence-length", 1], "--sequence-length"),
        (["--dtype", "float33"], "Did you mean 'float32'?"),
    ],
)
def test_wrong_options_are_usage_errors(run, model_folder, text_file, options, message):
    result = run("eval", model_folder, "--perplexity", text_file, *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_what_is_no_model_is_a_usage_error(run, tmp_path, text_file):
    for model, message in (
        (tmp_path, "has no config.json"),
        (text_file, "is a file"),
        (tmp_path / "absent", "no folder that exists"),
        ("nobody/no-such-model", "Cannot load a model"),
    ):
        result = run("eval", model, "--perplexity", text_file)
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_empty_and_binary_files_are_usage_errors(run, model_folder, tmp_path):
    for content, message in ((b" \n", "is empty"), (b"\xff\xfe\x00", "not UTF-8")):
        (tmp_path / "bad.txt").write_bytes(content)
        result = run("eval", model_folder, "--perplexity", tmp_path / "bad.txt")
        assert result.exit_code == 2
        assert message in result.stderr


def test_broken_weights_are_a_runtime_error(run, model_folder, text_file):
    (model_folder / "model.safetensors").write_bytes(b"no safetensors")
    result = run("eval", model_folder, "--perplexity", text_file, "--sequence-length", 32)
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr and "HF_EXT_DEBUG=1" in result.stderr
