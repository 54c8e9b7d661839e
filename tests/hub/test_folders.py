"""A folder appears whole or not at all."""

import errno

import pytest

from hf_ext.hub.folders import atomic_folder, cache_folder


def write_new(path, error=None):
    with atomic_folder(path) as folder:
        (folder / "file").write_text("new")
        if error is not None:
            raise error


def test_folder_appears_only_at_the_end(tmp_path):
    with atomic_folder(tmp_path / "parent" / "out") as folder:
        (folder / "file").write_text("new")
        assert not (tmp_path / "parent" / "out").exists()
    assert (tmp_path / "parent" / "out" / "file").read_text() == "new"
    assert [path.name for path in (tmp_path / "parent").iterdir()] == ["out"]


def test_old_folder_is_replaced_as_a_whole(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    write_new(out)
    assert [path.name for path in out.iterdir()] == ["file"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_failure_leaves_the_old_folder_and_nothing_else(tmp_path, error):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    with pytest.raises(type(error)):
        write_new(out, error)
    assert [path.name for path in out.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failure_leaves_no_folder_where_there_was_none(tmp_path):
    with pytest.raises(OSError, match="No space"):
        write_new(tmp_path / "out", OSError(errno.ENOSPC, "No space left on device"))
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_new(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "new"


def test_permissions_are_those_of_any_new_folder(tmp_path):
    (tmp_path / "plain").mkdir()
    write_new(tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_EXT_CACHE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / "hf_ext"
    monkeypatch.setenv("HF_EXT_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
