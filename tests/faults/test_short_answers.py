"""A store answers with fewer or more bytes than the size that it tells. Nothing of such an answer is served or kept."""

import itertools
import os
import threading
import uuid

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from seqwarm_kernels.data import (
    ChunkSource,
    ParquetSource,
    TokenSource,
    count_lengths,
    visible_files,
    write_chunks,
)
from seqwarm_kernels.data.files import transfers
from seqwarm_kernels.data.files.remote import (
    RemotePath,
    check_location,
    local_file,
    open_file,
    read_range,
    write_file,
)

from ..data.data_sets import FORMATS
from ..data.token_files import documents, ends, write_npy
from ..support.tiers import first_fast
from .mutations import refusal_of

TEXTS = [f"item {number}" for number in range(40)]


def half(content):
    return content[: len(content) // 2]


def longer(content):
    return content + b"\n"


class Store(MemoryFileSystem):
    """A store without checksums. `next_answers` tells how its next answers are changed, None is a right one."""

    protocol = "short"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012
    cachable = False
    next_answers = iter(())
    broken_file = None  #: the path of a file that is always answered in half
    cut_answers = 0  #: number of its answers
    tells_size = True
    lock = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("short://").strip("/")

    @classmethod
    def answer(cls, path, content):
        with cls.lock:
            if path == cls.broken_file:
                cls.cut_answers += 1
                return half(content)
            change = next(cls.next_answers, None)
        return content if change is None else change(content)

    def info(self, path, **kwargs):
        return super().info(path, **kwargs) | ({} if self.tells_size else {"size": None})

    def cat_file(self, path, start=None, end=None, **kwargs):
        return self.answer(path, super().cat_file(path, start, end))

    def get_file(self, rpath, lpath, **kwargs):
        with open(lpath, "wb") as file:
            file.write(self.cat_file(rpath))


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
    pytest.importorskip("upath")
    monkeypatch.setattr(transfers, "_WAITS", (0.0, 0.0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("next_answers", "broken_file", "cut_answers", "tells_size"):
        monkeypatch.setattr(Store, name, getattr(Store, name))  # put back at the end
    fsspec.register_implementation("short", Store, clobber=True)
    yield Store
    Store.store.clear()


def write_texts(folder, **options):
    write_chunks(TEXTS, folder, 15, length_fn=len, **options)
    return folder


def write_counted_parquet(folder):
    pytest.importorskip("pyarrow")
    write_chunks(TEXTS, folder, 15, format="parquet")
    count_lengths(folder, len)
    return folder


def write_ends(folder):
    np.save(folder / "ends.npy", ends(DOCUMENTS))
    return write_npy(folder, DOCUMENTS)


def lines(path):
    """Opens chunk files as a list, without their manifest."""
    return ChunkSource([path / f"chunk-{number:06d}.txt.gz" for number in range(3)])


DOCUMENTS = documents(30)
#: By name: writes files into a folder and returns their path, and opens the source there.
CASES = {
    "lines": (write_texts, lines),
    "texts": (write_texts, lambda path: ChunkSource(path, with_lengths=True)),
    "counted parquet": (write_counted_parquet, lambda path: ParquetSource(path, with_lengths=True)),
    "ends": (write_ends, lambda path: TokenSource(path, document_ends=path.with_name("ends.npy"))),
    **{
        name: (lambda folder, write=write: write(folder, DOCUMENTS), open_source)
        for name, (write, open_source) in FORMATS.items()
        if name in ("flat", "megatron", "mds", "zipped mds")
    },
}


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """The URL of a copy of files, a function that opens a source of it at a URL with a prefix, and its items."""
    write, open_source = CASES[request.param]
    folder = tmp_path / "files"
    folder.mkdir()
    path = write(folder)
    url = f"short://bucket/{uuid.uuid4().hex}"
    for file in visible_files(folder):
        write_file(check_location("path", f"{url}/{file.relative_to(folder)}"), file.read_bytes())
    inner = "" if path == folder else f"/{path.relative_to(folder)}"

    def open_at(prefix):
        return open_source(check_location("path", f"{prefix}{url}{inner}"))

    return url, open_at, items_of(open_source(path))


def items_of(source):
    return [str(item.tolist() if isinstance(item, np.ndarray) else item) for item in source]


@pytest.mark.parametrize("prefix", first_fast(["", "filecache::"]))
def test_each_answer_is_short_once(case, store, monkeypatch, tmp_path, prefix):
    _, open_at, right = case
    count = itertools.count()
    store.next_answers = (None for _ in count)
    assert items_of(open_at(prefix)) == right
    for number in range(next(count)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache {number}"))
        store.next_answers = iter([None] * number + [half])
        assert items_of(open_at(prefix)) == right
        assert next(store.next_answers, "none is left") == "none is left"
        assert items_of(open_at(prefix)) == right  # of the copies that were kept


@pytest.mark.parametrize("prefix", ["", "filecache::"])
def test_a_file_that_is_always_short_is_named(case, store, monkeypatch, tmp_path, prefix):
    url, open_at, right = case
    refusals = []
    for number, path in enumerate(visible_files(url)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache {number}"))
        store.broken_file, store.cut_answers = store._strip_protocol(str(path)), 0
        refusal = refusal_of(lambda: items_of(open_at(prefix)))
        assert (refusal is None) == (store.cut_answers == 0)  # not all files are read
        if refusal is not None:
            assert str(path) in refusal
            assert "bytes received, expected" in refusal
            refusals.append(refusal)
    assert refusals
    store.broken_file = None
    assert items_of(open_at(prefix)) == right


@pytest.fixture
def path():
    path = check_location("path", f"short://bucket/{uuid.uuid4().hex}")
    write_file(path, bytes(range(100)))
    return path


#: Ways to read the whole file.
READS = {
    "whole": RemotePath.read_bytes,
    "range": lambda path: read_range(path, 0, 100),
    "copy": lambda path: local_file(path).read_bytes(),
    "opened": lambda path: open_file(path).read(),
}


def test_a_short_copy_of_an_earlier_run_is_made_again(path):
    os.truncate(local_file(path), 50)
    assert local_file(path).read_bytes() == bytes(range(100))


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("change", [half, longer, lambda content: b""])
def test_an_answer_of_another_size_is_dropped(path, store, read, change):
    store.next_answers = iter([change, change])
    assert READS[read](path) == bytes(range(100))
    store.next_answers = itertools.repeat(change)
    write_file(path, bytes(range(100)))  # has no copy yet
    with pytest.raises(OSError, match=f"3 attempts failed.*{path}"):
        READS[read](path)
    store.next_answers = iter(())
    assert READS[read](path) == bytes(range(100))


@pytest.mark.parametrize("read", ["whole", "copy"])
@pytest.mark.parametrize("new", [b"new", bytes(200)])
def test_a_file_that_is_overwritten_while_it_is_read(path, store, read, new):
    """The size is the one before, the bytes are those after."""

    def overwritten(content):
        write_file(path, new)
        return new

    store.next_answers = iter([overwritten])
    assert READS[read](path) == new


@pytest.mark.parametrize("read", ["whole", "range", "copy"])
def test_a_store_that_tells_no_size(path, store, read):
    store.tells_size = False
    assert READS[read](path) == bytes(range(100))
    write_file(path.with_name("a.txt"), b"a\n")
    assert list(ChunkSource(path.with_name("a.txt"))) == ["a"]
