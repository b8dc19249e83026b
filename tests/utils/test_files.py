"""The files of a folder, with links, hidden files, files that are being written, and folders that cannot be read."""

import os

import pytest

from seqwarm_kernels.data import visible_files


@pytest.fixture
def folder(tmp_path):
    for name in ("b/c.txt", "b.txt", "a", ".hidden", ".git/d", "b/.e/f", "b/.g", "h.txt.0123.partial"):
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(name)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "i").write_text("i")
    return tmp_path / "root"


def names_in(folder, *options):
    return [path.relative_to(folder).as_posix() for path in visible_files(folder, *options)]


def test_files_are_sorted_without_hidden_and_partial_ones(folder):
    assert names_in(folder) == ["a", "b/c.txt", "b.txt"]
    assert visible_files(str(folder / ".git")) == [folder / ".git" / "d"]


def test_links_to_files_are_followed_and_links_to_folders_are_not(folder):
    (folder / "file").symlink_to(folder.parent / "other" / "i")
    (folder / "folder").symlink_to(folder.parent / "other")
    (folder / "b" / "parent").symlink_to(folder)
    assert names_in(folder) == ["a", "b/c.txt", "b.txt", "file"]


def test_links_to_nothing_are_reported_or_raise(folder):
    (folder / "loop").symlink_to("loop")
    (folder / "b" / "lost").symlink_to("nowhere")
    errors = []
    assert names_in(folder, errors.append) == ["a", "b/c.txt", "b.txt"]
    assert {error.filename for error in errors} == {str(folder / "loop"), str(folder / "b" / "lost")}
    with pytest.raises(OSError, match=r"loop|lost"):
        visible_files(folder)


def test_folders_that_cannot_be_read_are_reported_or_raise(folder, monkeypatch):
    scandir = os.scandir

    def denied(path):
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    errors = []
    assert names_in(folder, errors.append) == ["a", "b.txt"]
    assert [error.filename for error in errors] == [str(folder / "b")]
    with pytest.raises(PermissionError, match="Permission denied"):
        visible_files(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_pipes_are_left_out(folder):
    """Opening one would wait."""
    os.mkfifo(folder / "pipe")
    assert names_in(folder) == ["a", "b/c.txt", "b.txt"]
