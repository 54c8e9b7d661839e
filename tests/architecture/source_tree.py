"""What the architecture tests read: the source files of hf_ext, their imports and their place in the layers."""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_ext"
SURFACES = ("quantizers", "trainers", "generation", "steering", "models", "retrieval", "evaluation")
SOURCES = sorted(path.relative_to(ROOT) for path in PACKAGE.rglob("*.py"))
# A folder inside a surface is the room of one method, unless it is shared machinery that outgrew one file.
SHARED_FOLDERS = {"quantizers/export"}
ROOMS = sorted(
    path.relative_to(ROOT)
    for surface in SURFACES
    for path in (PACKAGE / surface).glob("*/")
    if path.is_dir() and path.name != "__pycache__" and f"{surface}/{path.name}" not in SHARED_FOLDERS
)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    """`hf_ext/core/errors.py` -> `hf_ext.core.errors`; `hf_ext/core/__init__.py` -> `hf_ext.core`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> list[tuple[str, int]]:
    """Every imported dotted name in a file with its line, those inside functions and TYPE_CHECKING blocks included."""
    found = []
    package = path.parent.parts
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join((*start, *([node.module] if node.module else [])))
            found += [(f"{prefix}.{alias.name}", node.lineno) for alias in node.names]
    return found


def import_all_modules() -> list[ModuleType]:
    return [import_module(module_name(path)) for path in SOURCES]
