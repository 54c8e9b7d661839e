"""`hf-ext demo` does what its table says."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import hf_ext
from hf_ext.cli.demo import Measured, reloads_identically, table
from hf_ext.hub.demo_model import demo_model
from tests import tiny


@pytest.fixture
def saved(tiny_llama, tmp_path):
    config = hf_ext.OSAQConfig(dataset=torch.randint(4, 64, (4, 32)), group_size=16)
    hf_ext.quantize(tiny_llama, config)
    tiny_llama.save_pretrained(tmp_path / "out")
    return tiny_llama, tmp_path / "out"


@pytest.mark.slow
def test_new_process_is_compared_bit_for_bit(saved):
    model, folder = saved
    input_ids = torch.arange(4, 24)[None]
    assert reloads_identically(model, folder, input_ids)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-3
    assert not reloads_identically(model, folder, input_ids)


@pytest.mark.slow
def test_whole_path_on_a_tiny_model(run, tiny_tokenizer, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    tiny.llama(hidden_size=64, head_dim=16, max_position_embeddings=1024).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    monkeypatch.setattr("hf_ext.cli.demo.find_model", lambda model: str(folder))
    monkeypatch.delenv("HF_EXT_DATA", raising=False)
    monkeypatch.setenv("HF_EXT_CACHE", str(tmp_path / "cache"))
    result = run("demo", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["reload_is_identical"]
    assert "sampled" in data["text"]
    assert data["models"][1]["weight_bytes"] == data["quantized_bytes"]


def test_table_shows_answers_as_they_are():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table([Measured("float32", 18.304, 538_000_000, "Paris [bold]")], "WikiText-2", Path("out")))
    shown = console.export_text()
    for part in ("WikiText-2", "float32", "18.30", "538 MB", "Paris [bold]"):
        assert part in shown


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_demo_on_the_real_model():
    try:
        demo_model()
    except ConnectionError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "hf_ext.cli.main", "demo", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    before, after = data["models"]
    assert data["reload_is_identical"]
    assert before["perplexity"] < after["perplexity"]
    assert after["weight_bytes"] < before["weight_bytes"]
    assert before["answer"] and after["answer"]
