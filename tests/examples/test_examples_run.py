"""Every example runs at toy size, is short, and the README's code blocks run one after the other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny


ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_at_toy_size(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 80
    done = subprocess.run([sys.executable, str(path), "--toy"], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout or "loss" in done.stdout


READMES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "hf_ext").rglob("README.md")))]


@pytest.mark.parametrize("readme", READMES)
def test_readme_code_runs(readme, tmp_path, monkeypatch, tiny_tokenizer):
    """As written, but that the demo model is a tiny one and the text is of its words."""
    tiny.llama().save_pretrained(tmp_path / "tiny")
    tiny_tokenizer.save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr("hf_ext.demo_model", lambda: str(tmp_path / "tiny"), raising=False)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / readme).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    text = '"' + " ".join(f"w{i % 50}" for i in range(400)) + '"'
    names: dict = {}
    for block in blocks:
        block = block.replace('"some", "calibration", "text"', text).replace('"real text, please"', text)
        block = block.replace('"some", "training text"', text)
        exec(compile(block.replace("group_size=64", "group_size=16"), readme, "exec"), names)
    assert names["model"](tiny_tokenizer("w1 w2", return_tensors="pt")["input_ids"]).logits.isfinite().all()
