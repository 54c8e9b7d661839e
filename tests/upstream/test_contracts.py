"""Upstream symbols that hf_ext relies on are as `core/upstream.py` says; these fail first when a release moves one."""

import ast
import inspect
from functools import reduce
from importlib import import_module
from importlib.metadata import version

import pytest
from packaging.specifiers import SpecifierSet

from hf_ext.core.upstream import UPSTREAM
from tests.architecture.source_tree import SOURCES, import_all_modules, imports_of, parse


MARKS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
UPSTREAM_PACKAGES = ("accelerate", "huggingface_hub", "optimum", "peft", "torch", "transformers", "trl")


def resolve(path: str):
    module, _, attributes = path.partition(":")
    return reduce(getattr, attributes.split("."), import_module(module))


def parameters_of(symbol) -> tuple[str, ...]:
    if hasattr(symbol, "_schema"):  # an operator of torch
        return tuple(argument.name for argument in symbol._schema.arguments)
    return tuple(MARKS.get(p.kind, "") + p.name for p in inspect.signature(symbol).parameters.values())


@pytest.mark.parametrize("symbol", UPSTREAM, ids=lambda symbol: symbol.path)
def test_symbol_exists_as_listed(symbol):
    found = resolve(symbol.path)
    if symbol.parameters is not None:
        assert parameters_of(found) == symbol.parameters, f"{symbol.path} changed; hf_ext: {symbol.why}"


@pytest.mark.parametrize("symbol", UPSTREAM, ids=lambda symbol: symbol.path)
def test_installed_version_is_in_the_listed_range(symbol):
    assert version(symbol.package) in SpecifierSet(symbol.versions)


def test_each_symbol_is_listed_once():
    paths = [symbol.path for symbol in UPSTREAM]
    assert sorted(paths) == sorted(set(paths))


def test_private_imports_are_listed():
    listed = {symbol.path.replace(":", ".") for symbol in UPSTREAM}
    unlisted = []
    for path in SOURCES:
        for target, line in imports_of(path):
            names = target.split(".")
            if names[0] in UPSTREAM_PACKAGES and any(name.startswith("_") for name in names) and target not in listed:
                unlisted.append(f"{path}:{line} imports {target}")
    assert unlisted == []


def test_private_torch_operators_are_listed():
    listed = {symbol.path.split(".")[-2] for symbol in UPSTREAM if symbol.package == "torch"}
    unlisted = []
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "torch.ops.aten":
                continue
            if node.attr.startswith("_") and node.attr not in listed:
                unlisted.append(f"{path}:{node.lineno} calls torch.ops.aten.{node.attr}")
    assert unlisted == []


def test_private_overrides_are_listed():
    """A private method of an upstream base class that one of our classes defines again must be in the table."""
    listed = {symbol.path for symbol in UPSTREAM}
    unlisted = set()
    for module in import_all_modules():
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != module.__name__:
                continue
            for base in cls.__mro__[1:]:
                if base.__module__.partition(".")[0] not in UPSTREAM_PACKAGES:
                    continue
                for name in vars(cls).keys() & vars(base).keys():
                    path = f"{base.__module__}:{base.__qualname__}.{name}"
                    if name.startswith("_") and not name.startswith("__") and inspect.isfunction(vars(base)[name]):
                        unlisted |= {f"{cls.__qualname__} overrides {path}"} if path not in listed else set()
    assert unlisted == set()
