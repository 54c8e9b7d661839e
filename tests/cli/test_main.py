"""Help is instant, and errors are a line with the right exit code."""

import json
import os
import subprocess
import sys

import pytest


def test_help_takes_under_a_second():
    """In processor time, which other processes on the machine do not stretch; the command waits for nothing."""
    seconds = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-m", "hf_ext.cli.main", "--help"], check=True, capture_output=True)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 1.0


def test_no_command_loads_torch_before_it_runs():
    code = (
        "import sys; from hf_ext.cli.main import app\n"
        "try: app(['quantize', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_names_every_command(run):
    result = run("--help")
    assert result.exit_code == 0
    for command in ("quantize", "eval", "demo"):
        assert command in result.stdout


def test_no_arguments_give_help_and_no_error(run):
    result = run()
    assert result.exit_code == 2
    assert "Usage" in result.output and "Error" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantise"], "Did you mean 'quantize'?"),
        (["quantize", "demo", "--bit", "3"], "--bits"),
        (["quantize", "demo"], "Missing option"),
        (["eval", "demo"], "Missing option '--perplexity'"),
        (["eval", "demo", "--perplexity", "absent.txt"], "No such file: 'absent.txt'"),
    ],
)
def test_usage_errors(run, arguments, message):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1
    result = run(*arguments, "--json")
    assert result.exit_code == 2
    assert message in json.loads(result.stdout)["error"]


def test_traceback_only_on_request(run, monkeypatch):
    monkeypatch.setenv("HF_EXT_DEBUG", "1")
    assert "Traceback" in run("eval", "demo", "--perplexity", "absent.txt").stderr
