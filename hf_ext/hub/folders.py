"""Folders that appear whole or not at all, and where hf_ext keeps what it made itself."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for what hf_ext made itself: `HF_EXT_CACHE`, or `hf_ext` inside `HF_HOME`."""
    from huggingface_hub.constants import HF_HOME

    return Path(os.environ.get("HF_EXT_CACHE") or Path(HF_HOME) / "hf_ext").expanduser()


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a new empty folder beside `path`; it takes the place of `path` when the block ends without an exception.

    A folder that stood at `path` stays as it was until then, and for good if the block raises (a full disk, Ctrl-C);
    the half-written folder is removed.
    """
    path = Path(path).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    new, old = work / "new", work / "old"
    try:
        new.mkdir()  # mkdtemp is private to the user; a folder made by mkdir has the permissions of any other
        yield new
        if path.exists():
            path.rename(old)
        try:
            new.rename(path)
        except BaseException:
            if old.exists():
                old.rename(path)
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
