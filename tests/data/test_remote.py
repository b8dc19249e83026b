"""Files at URLs: the same calls on a local folder, in memory and on an S3 server, and with faults of the server."""

import multiprocessing
import pickle
import sys
import uuid
import zipfile
from pathlib import Path

import pytest

from seqwarm_kernels.data import ChunkError, ChunkSource, TokenSource, write_chunks
from seqwarm_kernels.data.files import remote, transfers
from seqwarm_kernels.data.files.remote import (
    RemotePath,
    check_location,
    file_size,
    local_file,
    open_file,
    read_range,
    visible_files,
    write_file,
)

from .made import remove


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    pytest.importorskip("upath")
    monkeypatch.setattr(transfers, "_WAITS", (0.0, 0.0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request, tmp_path):
    """An empty folder, or the name of one."""
    if request.param == "local":
        return check_location("folder", tmp_path / "folder")
    if request.param == "s3":
        request.getfixturevalue("s3")
    return check_location("folder", f"{request.param}://bucket/{uuid.uuid4().hex}")


def test_the_methods_of_a_folder(folder):
    assert not folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    assert visible_files(folder) == []
    write_file(folder / "b.txt", b"second")
    write_file(folder / "a.txt", b"first")
    assert [path.name for path in visible_files(folder)] == ["a.txt", "b.txt"]
    assert folder.is_dir()
    assert not (folder / "a.txt").is_dir()
    assert (folder / "a.txt").exists()
    assert not (folder / "c.txt").exists()
    assert (folder / "a.txt").parent == folder
    remove(folder / "a.txt")
    assert not (folder / "a.txt").exists()


@pytest.mark.parametrize("root", ["memory://", "memory:///"])
def test_files_at_the_root_of_a_store(monkeypatch, tmp_path, root):
    monkeypatch.chdir(tmp_path)
    name = f"{uuid.uuid4().hex}.bin"
    path = check_location("path", root) / name
    write_file(path, b"content")
    for each in (path, check_location("path", f"{root}{name}"), path.with_name(name), path.parent / name):
        assert (each.name, each.read_bytes()) == (name, b"content")
    assert path in visible_files(path.parent)
    remove(path)
    assert not list(tmp_path.iterdir())  # a path such as memory:/name would be that of a local file


def test_the_content_of_a_file(folder):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "file.bin"
    content = bytes(range(256)) * 100
    write_file(path, content)
    assert file_size(path) == len(content)
    assert path.read_bytes() == local_file(path).read_bytes() == content
    with open_file(path) as file:
        file.seek(-10, 2)
        assert file.read() == content[-10:]
    write_file(path, b"new")
    assert path.read_bytes() == local_file(path).read_bytes() == b"new"
    with pytest.raises(FileNotFoundError):
        path.with_name("other").read_bytes()


def test_ranges_of_a_file(folder):
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "ranges", b"0123456789")
    cached = (
        check_location("path", f"filecache::{folder}/ranges") if isinstance(folder, RemotePath) else folder / "ranges"
    )
    for path in (folder / "ranges", cached):
        assert [read_range(path, *places) for places in ((2, 5), (0, 10), (7, 12))] == [b"234", b"0123456789", b"789"]


def test_visible_files_a_folder(folder):
    for name in ("b.txt", "a/c.txt", ".hidden", "a/.d/e.txt", "f.txt.0.partial"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, b"content")
    assert visible_files(folder) == [folder / "a/c.txt", folder / "b.txt"]


def test_a_pickled_path(s3):
    path = check_location("path", "s3://bucket/pickled")
    write_file(path, b"content")
    assert pickle.loads(pickle.dumps(path)).read_bytes() == b"content"


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_path_in_another_process(s3, context):
    path = check_location("path", "s3://bucket/shared")
    write_file(path, b"content")
    here = local_file(path)
    with multiprocessing.get_context(context).Pool(1) as pool:
        assert pool.apply(_read, (path,)) == (b"content", here)


def _read(path):
    return path.read_bytes(), local_file(path)


def test_a_copy_is_downloaded_once_and_kept(s3):
    path = check_location("path", "filecache::s3://bucket/copied")
    write_file(path, b"old")
    old = local_file(path)
    requests = len(s3.requests)
    assert path.read_bytes() == b"old"
    assert ("GET", "/bucket/copied") not in s3.requests[requests:]
    write_file(path, b"new")
    assert (path.read_bytes(), old.read_bytes()) == (b"new", b"old")


def test_the_folder_of_copies(monkeypatch, tmp_path):
    from fsspec.config import conf

    assert remote.cache_folder() == tmp_path / "cache" / "seqwarm_kernels" / "files"
    monkeypatch.setitem(conf, "filecache", {"cache_storage": str(tmp_path / "elsewhere")})
    path = check_location("path", "memory://bucket/elsewhere")
    write_file(path, b"content")
    assert tmp_path / "elsewhere" in local_file(path).parents


def test_a_folder_of_copies_that_cannot_be_used_is_named(monkeypatch, tmp_path):
    """And not the file at the URL, which is there."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = check_location("path", "memory://bucket/uncached.bin")
    write_file(path, bytes(100))
    with pytest.raises(ChunkError, match=f"{path}: cannot be read: .*Not a directory: '{tmp_path}/file/"):
        TokenSource(path, end_token=0)


@pytest.mark.parametrize("prefix", ["", "filecache::"])
def test_a_file_in_a_zip_file_at_a_url(tmp_path, prefix):
    with zipfile.ZipFile(tmp_path / "texts.zip", "w") as file:
        file.writestr("folder/a.txt", "first\nsecond\n")
    write_file(check_location("path", "memory://bucket/texts.zip"), (tmp_path / "texts.zip").read_bytes())
    source = ChunkSource(f"{prefix}zip://folder/a.txt::memory://bucket/texts.zip", shuffle=False)
    assert list(source) == ["first", "second"]


@pytest.mark.parametrize("kind", ["500", "cut", "slow"])  # of short answers: tests/faults
def test_faults_that_pass(s3, kind):
    path = check_location("path", f"s3://bucket/fault-{kind}")
    content = bytes(range(256)) * 400
    write_file(path, content)
    for use in (path.read_bytes, lambda: local_file(path).read_bytes(), lambda: open_file(path).read()):
        with s3.fail(kind, path.name):
            assert use() == content
            assert s3.faults_left == 0


@pytest.mark.parametrize("kind", ["500", "cut"])
def test_faults_that_stay(s3, kind, monkeypatch):
    path = check_location("path", "s3://bucket/broken")
    write_file(path, b"content" * 100)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    monkeypatch.setattr(transfers, "_WAITS", (0.0,))
    for use in (path.read_bytes, lambda: local_file(path)):
        with s3.fail(kind, "broken", times=1000), pytest.raises(OSError, match="2 attempts failed, the last with"):
            use()
    assert local_file(path).read_bytes() == b"content" * 100


def test_a_store_that_cannot_be_reached_is_not_an_empty_folder(s3, monkeypatch):
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    path = check_location("path", "s3://bucket/nothing")
    assert not path.exists()
    folder = check_location("path", "s3://bucket/unread")
    write_chunks(["a"], folder, progress=False)
    for use, error, method in (
        (path.exists, OSError, "HEAD"),
        (path.is_dir, OSError, "HEAD"),
        (lambda: ChunkSource(path), ChunkError, "HEAD"),
        (lambda: ChunkSource(folder), ChunkError, "GET"),
    ):
        with s3.fail("500", "n", method=method, times=1000), pytest.raises(error, match="3 attempts failed"):
            use()


def test_a_failed_write_leaves_the_old_file(s3, monkeypatch):
    path = check_location("path", "s3://bucket/written")
    write_file(path, b"old")
    with s3.fail("500", "written", method="PUT", times=1000), pytest.raises(OSError, match="3 attempts failed"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    with s3.fail("500", "written", method="PUT"):
        write_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_stores_that_are_not_atomic_rename(monkeypatch):
    monkeypatch.setattr(remote, "_OBJECT_STORES", set())
    folder = check_location("folder", f"memory://bucket/{uuid.uuid4().hex}")
    write_file(folder / "file", b"content")
    assert [(path.name, path.read_bytes()) for path in visible_files(folder)] == [("file", b"content")]
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.mv", lambda *arguments: 1 / 0)
    with pytest.raises(OSError, match="ZeroDivisionError"):
        write_file(folder / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in visible_files(folder)] == [("file", b"content")]


def test_a_bucket_is_not_created(s3):
    folder = check_location("folder", "s3://another-bucket/a/b")
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.raises(FileNotFoundError, match="s3://another-bucket/a/b/file"):
        write_file(folder / "file", b"content")


@pytest.mark.parametrize("value", ["nothing://a/b", 5, b"s3://a/b"])
def test_invalid_locations(value):
    with pytest.raises((TypeError, ValueError), match="paths"):
        check_location("paths", value)


def test_a_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match="gcsfs"):
        check_location("paths", "gs://a/b").exists()
    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(ImportError, match="universal_pathlib"):
        check_location("paths", "s3://a/b")
    assert check_location("paths", "a/b") == Path("a/b")


def test_local_paths():
    for value in ("/a/b", "file:///a/b", "local:///a/b", Path("/a/b")):
        assert check_location("path", value) == Path("/a/b")


def test_a_path_of_universal_pathlib(tmp_path):
    import upath

    place = upath.UPath("s3://bucket/file", anon=True)
    assert check_location("path", place) == RemotePath(place)
    assert check_location("path", upath.UPath(tmp_path)) == check_location("path", f"file://{tmp_path}") == tmp_path


def test_other_stores_are_named_with_their_host():
    path = check_location("path", "sftp://host/folder/file")
    assert [str(each) for each in (path, path.parent)] == ["sftp://host/folder/file", "sftp://host/folder"]
