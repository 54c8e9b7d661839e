"""`import hf_ext` is light and quiet, and every module can be imported on its own."""

import subprocess
import sys
from pathlib import Path

import pytest

import hf_ext
from tests.architecture.source_tree import PACKAGE, ROOT, SOURCES, module_name
from tests.fresh_process import FreshProcesses


IMPORT_SECONDS = 0.3
HEAVY = ("torch", "transformers", "peft", "accelerate", "datasets", "numpy", "huggingface_hub")
# Files that hold what has no better name grow without a bound.
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "other"}


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_tests_run_on_this_checkout():
    assert Path(hf_ext.__file__).resolve() == (PACKAGE / "__init__.py").resolve()


def test_import_loads_nothing_heavy_and_prints_nothing():
    loaded = f"[name for name in {HEAVY} if name in sys.modules]"
    assert run_python(f"import sys, hf_ext; assert {loaded} == [], {loaded}") == ""


def test_version_needs_no_heavy_import():
    assert run_python("import sys, hf_ext; hf_ext.__version__; assert 'torch' not in sys.modules") == ""


def test_import_takes_under_the_limit():
    """In seconds of CPU time, the best of several runs: what else the machine does only makes a run slower."""
    code = "import time; start = time.process_time(); import hf_ext; print(time.process_time() - start)"
    assert min(float(run_python(code)) for _ in range(5)) < IMPORT_SECONDS


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_no_banned_file_names(path):
    assert BANNED_NAMES.isdisjoint(path.with_suffix("").parts)


def test_every_module_is_importable_first():
    """Each module alone in its process, so that none works only because another was imported before it."""
    with FreshProcesses("transformers.modeling_utils", "peft", "rich.table", "typer") as processes:
        for path in SOURCES:
            processes.run(f"import {module_name(path)}")


def test_no_todo_is_left():
    marked = []
    for path in (*SOURCES, *(file.relative_to(ROOT) for file in (ROOT / "examples").rglob("*.py"))):
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), start=1):
            marked += [f"{path}:{number}" for word in ("TODO", "FIXME", "XXX") if word in line]
    assert marked == []
