"""The public names: one table, which agrees with the rooms, the docstrings and the README."""

import inspect
import pickle
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version

import pytest

import hf_ext
from hf_ext._public import PUBLIC, QUANTIZERS
from hf_ext.core.errors import MissingExtraError, closest
from tests.architecture.source_tree import ROOMS, ROOT


EXPECTED = [
    "CatQConfig",
    "LittleBit2Config",
    "LittleBit2Trainer",
    "LowBitLinear",
    "OSAQConfig",
    "QuantizationReport",
    "RopeDistillationConfig",
    "RopeDistillationTrainer",
    "SAFTConfig",
    "SAFTTrainer",
    "absorb_outliers",
    "demo_model",
    "export_gguf",
    "export_gptq",
    "pack",
    "perplexity",
    "quantize",
    "saft_loss",
    "saft_weight",
]


def test_public_names_are_pinned():
    """A name that appears here is a promise: adding one is a decision, removing one needs a deprecation."""
    assert hf_ext.__all__ == sorted(PUBLIC) == EXPECTED


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_importable_and_documented(name):
    value = getattr(hf_ext, name)
    assert value is getattr(import_module(PUBLIC[name]), name)
    assert inspect.isclass(value) or inspect.isfunction(value)
    assert len(inspect.getdoc(value) or "") > 40
    assert value.__doc__ is not None and not value.__doc__.startswith(f"{name}(")  # what dataclass writes by itself


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_in_the_readme(name):
    assert name in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PUBLIC)
def test_public_signature_is_typed(name):
    value = getattr(hf_ext, name)
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
        assert untyped == []
        assert signature.return_annotation is not signature.empty


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_rooms_export_what_the_table_says(room):
    module_name = ".".join(room.parts)
    module = import_module(module_name)
    assert sorted(module.__all__) == sorted(name for name, home in PUBLIC.items() if home == module_name)


@pytest.mark.parametrize("path", [path for paths in QUANTIZERS.values() for path in paths])
def test_quantizer_table_names_the_defining_module(path):
    """`_register` tells our classes from others' by this name."""
    module, _, name = path.partition(":")
    cls = getattr(import_module(module), name)
    assert f"{cls.__module__}:{cls.__qualname__}" == path


@pytest.mark.parametrize("quant_method", QUANTIZERS)
def test_config_carries_its_method(quant_method):
    module, _, name = QUANTIZERS[quant_method][0].partition(":")
    assert getattr(import_module(module), name).quant_method == quant_method


def test_dir_lists_names_before_they_are_used():
    assert {*PUBLIC, "__version__"} <= set(dir(hf_ext))


def test_version_is_the_installed_one():
    assert hf_ext.__version__ == version("hf_ext")


def test_star_import_gives_the_public_names():
    namespace: dict = {}
    exec("from hf_ext import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(PUBLIC)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(
        AttributeError,
        match="has no attribute 'OsaqConfig'. Did you mean 'OSAQConfig'? Available: ".replace("?", r"\?"),
    ):
        hf_ext.OsaqConfig  # noqa: B018


def test_absent_package_of_a_public_name_names_the_extra():
    code = (
        "import sys; sys.modules['trl'] = None\n"
        "import hf_ext; hf_ext.saft_weight\n"  # needs no TRL
        "try: hf_ext.SAFTTrainer\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == 'SAFTTrainer needs trl, which is not installed. Run: pip install "hf_ext[train]".\n'


def test_closest():
    assert (
        closest("sphericl", ["spherical", "dynasteer"])
        == " Did you mean 'spherical'? Available: dynasteer, spherical."
    )
    assert closest("zzz", ["spherical"]) == " Available: spherical."
    assert closest("zzz", []) == " Available: none."


def test_missing_extra_names_the_command_and_survives_pickling():
    error = MissingExtraError("matplotlib", "viz", "QuantizationReport.plot")
    assert str(error) == (
        'QuantizationReport.plot needs matplotlib, which is not installed. Run: pip install "hf_ext[viz]".'
    )
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.name, copy.extra) == (str(error), "matplotlib", "viz")
