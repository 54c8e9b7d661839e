"""Wheel and source distribution carry everything that lies in hf_ext/; extras and constraints agree."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import entry_points, metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.architecture.source_tree import PACKAGE, ROOT


SKIPPED_FOLDERS = ("__pycache__",)


def files_on_disk() -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and not any(folder in path.parts for folder in SKIPPED_FOLDERS)
    }


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel (built from the source distribution, as pip does) and the source distribution; needs no network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / "hf_ext", ignore=shutil.ignore_patterns(*SKIPPED_FOLDERS))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def test_wheel_carries_every_file(distributions):
    with zipfile.ZipFile(distributions[0]) as wheel:
        carried = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert carried == files_on_disk()


def test_wheel_carries_the_licence(distributions):
    with zipfile.ZipFile(distributions[0]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("licenses/LICENSE"))
        assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def test_source_distribution_carries_every_file(distributions):
    with tarfile.open(distributions[1]) as archive:
        carried = {name.partition("/")[2] for name in archive.getnames()}
    assert files_on_disk() | {"LICENSE", "README.md", "pyproject.toml"} <= carried


def test_installed_wheel_works_elsewhere(distributions, tmp_path):
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*install, str(distributions[0])], check=True, capture_output=True, timeout=120)
    code = "import hf_ext; print(hf_ext.__file__); print(hf_ext.__version__); print(hf_ext.OSAQConfig.quant_method)"
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(target / "hf_ext" / "__init__.py"), metadata("hf_ext")["Version"], "osaq"]


def test_command_is_declared():
    (command,) = (point for point in entry_points(group="console_scripts") if point.name == "hf-ext")
    assert command.value == "hf_ext.cli.main:main"
    assert callable(command.load())


def test_extras_named_in_messages_exist():
    declared = set(metadata("hf_ext").get_all("Provides-Extra"))
    named = set()
    for path in PACKAGE.rglob("*.py"):
        named |= set(re.findall(r'MissingExtraError\(\s*"[^"]*",\s*"([^"]*)"', path.read_text(encoding="utf-8")))
    assert named <= declared


def test_constraints_pin_every_requirement_exactly():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, separator, pin = line.partition("==")
            assert separator and pin, line
            pins[normalised(name)] = pin
    for requirement in map(Requirement, requires("hf_ext")):
        if normalised(requirement.name) != "hf-ext":
            pin = pins.get(normalised(requirement.name))
            assert pin is not None, f"constraints.txt does not pin {requirement.name}"
            assert pin in requirement.specifier, f"{requirement} excludes the tested {pin}"


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
