"""A folder in a surface is one method, and all methods are laid out alike."""

import sys

import pytest

from hf_ext._public import PUBLIC
from tests.architecture.source_tree import ROOMS, ROOT, SOURCES, SURFACES, imports_of, module_name


REQUIRED = {"__init__.py", "functional.py", "README.md"}
EQUATION_IMPORTS = {"torch", "numpy", *sys.stdlib_module_names}


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_room_has_its_files(room):
    present = {path.name for path in (ROOT / room).iterdir()}
    assert present >= REQUIRED, f"{room} lacks {sorted(REQUIRED - present)}"
    # The settings (`config.py`; models of a scheme keep them in the model's own config) and the Hugging Face side.
    assert "config.py" in present or room.parts[1] == "models", f"{room} lacks config.py"
    assert len([name for name in present if name.endswith(".py")]) >= 3, f"{room} has no integration file"


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_room_has_tests(room):
    tests = ROOT / "tests" / room.relative_to("hf_ext")
    assert (tests / "__init__.py").is_file()
    assert (tests / "test_functional.py").is_file()


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_room_has_a_public_name(room):
    prefix = ".".join(room.parts)
    assert any(f"{module}.".startswith(f"{prefix}.") for module in PUBLIC.values()), (
        f"{room} has no line in _public.py"
    )


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "functional.py"], ids=str)
def test_equations_need_torch_only(path):
    wrong = [f"line {line}: {name}" for name, line in imports_of(path) if name.split(".")[0] not in EQUATION_IMPORTS]
    assert wrong == []


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parts[1] == "ops"], ids=str)
def test_operations_need_no_hugging_face_package(path):
    allowed = EQUATION_IMPORTS | {"hf_ext", "triton"}
    wrong = [f"line {line}: {name}" for name, line in imports_of(path) if name.split(".")[0] not in allowed]
    assert wrong == []


def test_every_folder_of_the_package_is_a_package():
    folders = {path.parent for path in SOURCES}
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").is_file()] == []


def test_tests_mirror_the_surfaces():
    """Every surface with code has a test folder of its name, and every test folder is a package."""
    for surface in {path.parts[1] for path in SOURCES if path.parts[1] in (*SURFACES, "ops", "hub", "cli")}:
        assert (ROOT / "tests" / surface / "__init__.py").is_file(), (
            f"tests/{surface} is missing or has no __init__.py"
        )
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_module_names_are_unambiguous():
    assert len({module_name(path) for path in SOURCES}) == len(SOURCES)
