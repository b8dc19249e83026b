"""Files, sources and writers at URLs do what they do in a local folder, whatever the server does wrong."""

import itertools
import multiprocessing
import pickle
import sys
import time
import uuid
import zipfile
from pathlib import Path

import pytest

from seqwarm_kernels.data import ChunkError, ChunkSource, TokenSource, visible_files, write_chunks
from seqwarm_kernels.data.files import remote
from seqwarm_kernels.data.files.remote import (
    RemotePath,
    check_location,
    file_size,
    local_file,
    open_file,
    read_range,
    write_file,
)
from seqwarm_kernels.data.files.transfers import read_ahead

from .made import TEXTS, remove, through_json

upath = pytest.importorskip("upath")

# ---- paths


@pytest.mark.parametrize("place", ["local", "memory", "s3"], indirect=True)
def test_a_folder_and_its_files(place):
    assert not place.is_dir()
    place.mkdir(parents=True, exist_ok=True)
    assert visible_files(place) == []
    path, content = place / "b.txt", bytes(range(256)) * 100
    for each in (path, *(place / name for name in ("a/c.txt", ".hidden", "a/.d/e.txt", "f.txt.0.partial"))):
        each.parent.mkdir(parents=True, exist_ok=True)
        write_file(each, content)
    assert visible_files(place) == [place / "a/c.txt", path]
    assert (place.is_dir(), path.is_dir(), path.exists(), path.parent) == (True, False, True, place)
    assert file_size(path) == len(content)
    assert path.read_bytes() == local_file(path).read_bytes() == content
    with open_file(path) as file:
        file.seek(-10, 2)
        assert file.read() == content[-10:]
    cached = check_location("path", f"filecache::{path}") if isinstance(place, RemotePath) else path
    for each, (begin, end) in itertools.product((path, cached), ((2, 5), (0, 25_600), (25_000, 30_000))):
        assert read_range(each, begin, end) == content[begin:end]
    write_file(path, b"new")
    assert path.read_bytes() == local_file(path).read_bytes() == b"new"
    remove(path)
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        path.read_bytes()


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


def test_which_paths_are_local(monkeypatch, tmp_path):
    for value in ("/a/b", "file:///a/b", "local:///a/b", Path("/a/b")):
        assert check_location("path", value) == Path("/a/b")
    place = upath.UPath("s3://bucket/file", anon=True)
    assert check_location("path", place) == RemotePath(place)
    assert check_location("path", upath.UPath(tmp_path)) == check_location("path", f"file://{tmp_path}") == tmp_path
    path = check_location("path", "sftp://host/folder/file")
    assert [str(each) for each in (path, path.parent)] == ["sftp://host/folder/file", "sftp://host/folder"]
    for value in ("nothing://a/b", 5, b"s3://a/b"):
        with pytest.raises((TypeError, ValueError), match="paths"):
            check_location("paths", value)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match="gcsfs"):
        check_location("paths", "gs://a/b").exists()
    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(ImportError, match="universal_pathlib"):
        check_location("paths", "s3://a/b")
    assert check_location("paths", "a/b") == Path("a/b")


# ---- local copies


def read(path):
    return path.read_bytes(), local_file(path)


def test_a_file_of_another_process_is_seen(s3):
    import s3fs

    place = check_location("folder", "s3://bucket/listed")
    write_file(place / "a", b"a")
    assert visible_files(place) == [place / "a"]
    s3fs.S3FileSystem(skip_instance_cache=True).pipe_file("bucket/listed/a", b"longer")
    assert file_size(place / "a") == len(b"longer")


def test_a_copy_is_downloaded_once_and_kept(s3):
    path = check_location("path", "filecache::s3://bucket/copied")
    write_file(path, b"old")
    old = local_file(path)
    requests = len(s3.requests)
    assert pickle.loads(pickle.dumps(path)).read_bytes() == b"old"
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(read, (path,)) == (b"old", old)
    assert ("GET", "/bucket/copied") not in s3.requests[requests:]
    write_file(path, b"new")
    assert (path.read_bytes(), old.read_bytes()) == (b"new", b"old")


def test_the_folder_of_copies(monkeypatch, tmp_path):
    """One that cannot be used is named, and not the file at the URL, which is there."""
    from fsspec.config import conf

    assert remote.cache_folder() == tmp_path / "cache" / "seqwarm_kernels" / "files"
    path = check_location("path", f"memory://bucket/{uuid.uuid4().hex}")
    write_file(path, bytes(100))
    with monkeypatch.context() as patch:
        patch.setitem(conf, "filecache", {"cache_storage": str(tmp_path / "elsewhere")})
        assert tmp_path / "elsewhere" in local_file(path).parents
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ChunkError, match=f"{path}: cannot be read: .*Not a directory: '{tmp_path}/file/"):
        TokenSource(path, end_token=0)


@pytest.mark.parametrize("prefix", ["", "filecache::"])
def test_a_file_in_a_zip_file_at_a_url(tmp_path, prefix):
    with zipfile.ZipFile(tmp_path / "texts.zip", "w") as file:
        file.writestr("folder/a.txt", "first\nsecond\n")
    write_file(check_location("path", "memory://bucket/texts.zip"), (tmp_path / "texts.zip").read_bytes())
    source = ChunkSource(f"{prefix}zip://folder/a.txt::memory://bucket/texts.zip", shuffle=False)
    assert list(source) == ["first", "second"]


# ---- faults of the server; of short answers: tests/faults


@pytest.mark.parametrize("kind", ["500", "cut"])
def test_faults_of_answers(s3, kind, monkeypatch):
    """Those that pass are not seen, and those that stay leave no copy."""
    path, content = check_location("path", f"s3://bucket/fault-{kind}"), bytes(range(256)) * 400
    write_file(path, content)
    for use in (path.read_bytes, lambda: local_file(path).read_bytes(), lambda: open_file(path).read()):
        with s3.fail(kind, path.name):
            assert use() == content
            assert s3.faults_left == 0
    write_file(path, content[:-1])
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    for use in (path.read_bytes, lambda: local_file(path)):
        with s3.fail(kind, path.name, times=1000), pytest.raises(OSError, match="2 attempts failed, the last with"):
            use()
    assert local_file(path).read_bytes() == content[:-1]


def test_faults_of_writes(s3, monkeypatch):
    path = check_location("path", "s3://bucket/written")
    write_file(path, b"old")
    with s3.fail("500", "written", method="PUT"):
        write_file(path, b"new")
    with s3.fail("500", "written", method="PUT", times=1000), pytest.raises(OSError, match="2 attempts failed"):
        write_file(path, b"newer")
    assert path.read_bytes() == b"new"
    place = check_location("folder", "s3://another-bucket/a/b")
    place.mkdir(parents=True, exist_ok=True)  # creates no bucket
    with pytest.raises(FileNotFoundError, match="s3://another-bucket/a/b/file"):
        write_file(place / "file", b"content")


def test_a_store_that_cannot_be_reached_is_not_an_empty_folder(s3, monkeypatch):
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    path, written = (check_location("path", f"s3://bucket/{name}") for name in ("nothing", "unread"))
    assert not path.exists()
    write_chunks(["a"], written, progress=False)
    for use, error, method in (
        (path.exists, OSError, "HEAD"),
        (path.is_dir, OSError, "HEAD"),
        (lambda: ChunkSource(path), ChunkError, "HEAD"),
        (lambda: ChunkSource(written), ChunkError, "GET"),
    ):
        with s3.fail("500", "n", method=method, times=1000), pytest.raises(error, match="2 attempts failed"):
            use()


def test_stores_that_are_not_atomic_rename(monkeypatch):
    monkeypatch.setattr(remote, "_OBJECT_STORES", set())
    place = check_location("folder", f"memory://bucket/{uuid.uuid4().hex}")
    write_file(place / "file", b"content")
    assert [(path.name, path.read_bytes()) for path in visible_files(place)] == [("file", b"content")]
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.mv", lambda *arguments: 1 / 0)
    with pytest.raises(OSError, match="ZeroDivisionError"):
        write_file(place / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in visible_files(place)] == [("file", b"content")]


# ---- sources and writers


def test_names_with_special_characters(s3):
    name = "a b#c%20d?e=f&g ü[*]"
    url = f"s3://bucket/{name}"
    write_chunks(["x", "y", "z"], url, 2, length_fn=len)
    source = ChunkSource(url, shuffle=False, with_lengths=True)
    assert list(source) == [("x", 1), ("y", 1), ("z", 1)]
    assert list(ChunkSource(visible_files(url)[1])) == ["x", "y"]
    path = check_location("path", f"{url}/{name}.bin")
    write_file(path, bytes([5, 0, 7, 0, 6, 0, 7, 0]))
    assert TokenSource(path, end_token=7).lengths().tolist() == [2, 2]
    assert path in visible_files(url)


def test_reading_goes_on(s3, folder, monkeypatch):
    """After a fault, and in a copy of a local folder."""
    url = "s3://bucket/chunks"
    write_chunks(TEXTS, url, 100, length_fn=len)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    local, copy = (ChunkSource(place, shuffle=False) for place in (folder, url))
    head = list(itertools.islice(local, 350))
    copy.load_state_dict(through_json(local.state_dict()))
    with s3.fail("500", "chunk-000006", times=100), pytest.raises(ChunkError, match=f"{url}/chunk-000006"):
        head += copy
    assert head + list(copy) == TEXTS


# ---- reading ahead


def test_read_ahead_is_bounded_and_in_order():
    begun = []
    results = read_ahead(lambda number: (begun.append(number), number)[1], range(20), 3)
    assert next(results) == 0
    time.sleep(0.05)
    assert len(begun) <= 4
    assert list(results) == list(range(1, 20))
