"""Imports point down, and methods do not know each other."""

import pytest

from tests.architecture.source_tree import ROOMS, ROOT, SOURCES, SURFACES, imports_of


# `_register` reaches what lies above it by name, from the tables of `_public`, and so stands with the core.
RANK = {
    "__version__": 0,
    "_public": 0,
    "_kernels": 0,
    "ops": 1,
    "core": 2,
    "_register": 2,
    **dict.fromkeys(SURFACES, 3),
    "hub": 4,
    "__init__": 5,
    "cli": 6,
}
# The only imports from one surface into another.
CROSS_SURFACE: set[tuple[str, str]] = set()


def layer_of(dotted: str) -> str:
    """The layer of a dotted name below hf_ext. Public names such as `hf_ext.quantize` may come from any surface."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in RANK else "__init__"


def layer_of_file(path) -> str:
    return path.with_suffix("").parts[1]


def internal_imports() -> list[tuple[str, str, str]]:
    return [
        (layer_of_file(path), layer_of(target), f"{path}:{line} imports {target}")
        for path in SOURCES
        for target, line in imports_of(path)
        if target.split(".")[0] == "hf_ext"
    ]


def points_down(source: str, target: str) -> bool:
    return RANK[target] < RANK[source] or source == target or (source, target) in CROSS_SURFACE


def test_every_file_is_in_a_layer():
    assert [str(path) for path in SOURCES if layer_of_file(path) not in RANK] == []


def test_imports_point_down():
    wrong = [where for source, target, where in internal_imports() if not points_down(source, target)]
    assert wrong == []


@pytest.mark.parametrize(
    "source, target, allowed",
    [
        ("quantizers", "core", True),
        ("core", "quantizers", False),
        ("ops", "core", False),
        ("quantizers", "evaluation", False),
        ("quantizers", "__init__", False),
        ("hub", "quantizers", True),
        ("cli", "hub", True),
        ("cli", "__init__", True),
    ],
)
def test_the_rule_itself(source, target, allowed):
    assert points_down(source, target) is allowed


def test_rooms_do_not_import_each_other():
    wrong = []
    for room in ROOMS:
        others = [".".join(other.parts) for other in ROOMS if other != room]
        for path in SOURCES:
            if room not in path.parents:
                continue
            for target, line in imports_of(path):
                if any(f"{target}.".startswith(f"{other}.") for other in others):
                    wrong.append(f"{path}:{line} imports {target}")
    assert wrong == []


def test_shared_files_of_a_surface_do_not_import_its_rooms():
    wrong = []
    for path in SOURCES:
        if layer_of_file(path) not in SURFACES or any(room in path.parents for room in ROOMS):
            continue
        for target, line in imports_of(path):
            if any(f"{target}.".startswith(f"{'.'.join(room.parts)}.") for room in ROOMS):
                wrong.append(f"{path}:{line} imports {target}")
    assert wrong == []


def test_shared_files_never_name_a_method():
    wrong = []
    for path in SOURCES:
        if layer_of_file(path) not in (*SURFACES, "core", "ops", "_register") or any(r in path.parents for r in ROOMS):
            continue
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), start=1):
            wrong += [f"{path}:{number} names {room.name}" for room in ROOMS if room.name in line.lower()]
    assert wrong == []
