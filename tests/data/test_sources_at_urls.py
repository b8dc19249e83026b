"""Sources and writers at URLs do what they do in a local folder, and what the server does wrong does not change it."""

import itertools
import threading
import time

import pytest

from seqwarm_kernels.data import ChunkError, ChunkSource, TokenSource, visible_files, write_chunks
from seqwarm_kernels.data.files import remote, transfers
from seqwarm_kernels.data.files.remote import check_location
from seqwarm_kernels.data.files.transfers import read_ahead

from .made import TEXTS, remove, through_json


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    pytest.importorskip("upath")
    monkeypatch.setattr(transfers, "_WAITS", (0.0,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def url(s3):
    """The items of `folder` on the S3 server."""
    url = "s3://bucket/chunks"
    write_chunks(TEXTS, url, 100, length_fn=len)
    return url


OPTIONS = [{}, {"shuffle": False}, {"buffer_chunks": 3, "with_lengths": True}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("prefix", ["", "filecache::"])
def test_the_items_of_a_folder(folder, url, prefix, options):
    assert list(ChunkSource(prefix + url, **options)) == list(ChunkSource(folder, **options))


@pytest.mark.parametrize("read", [0, 1, 350, 1003])
def test_a_state_of_a_local_folder_is_one_of_its_copy(folder, url, read):
    local = ChunkSource(folder, buffer_chunks=2)
    iterator = iter(local)
    list(itertools.islice(iterator, read))
    copy = ChunkSource(url, buffer_chunks=2)
    copy.load_state_dict(through_json(local.state_dict()))
    assert list(copy) == list(iterator if read < 1003 else local)


@pytest.mark.parametrize("name", ["a b", "a#b", "a%20b", "a?b=c&d", "ü[*]"])
def test_names_with_special_characters(s3, name):
    url = f"s3://bucket/{name}"
    write_chunks(["x", "y", "z"], url, 2, length_fn=len)
    source = ChunkSource(url, shuffle=False, with_lengths=True)
    assert list(source) == [("x", 1), ("y", 1), ("z", 1)]
    assert list(ChunkSource(visible_files(url)[1])) == ["x", "y"]
    path = check_location("path", f"{url}/{name}.bin")
    remote.write_file(path, bytes([5, 0, 7, 0, 6, 0, 7, 0]))
    assert TokenSource(path, end_token=7).lengths().tolist() == [2, 2]
    assert path in visible_files(url)


def test_faults_that_stay_name_the_file(s3, url, monkeypatch):
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    source = ChunkSource(url, shuffle=False)
    iterator = iter(source)
    before = list(itertools.islice(iterator, 350))
    with (
        s3.fail("500", "chunk-000004", times=100),
        pytest.raises(ChunkError, match=f"{url}/chunk-000004"),
    ):
        before += iterator
    assert before + list(source) == TEXTS


def test_damaged_and_missing_files_are_named(url, s3):
    copy = check_location("copy", "s3://bucket/damaged")
    for file in visible_files(url):
        remote.write_file(copy / file.name, file.read_bytes())
    damaged = copy / "chunk-000003.txt.gz"
    remote.write_file(damaged, damaged.read_bytes()[:-10])
    with pytest.raises(ChunkError, match=str(damaged)):
        list(ChunkSource(copy))
    remove(damaged)
    with pytest.raises(ChunkError, match=str(damaged)):
        list(ChunkSource(copy))
    with pytest.warns(UserWarning, match=f"skipped: {damaged}"):
        assert list(ChunkSource(copy, shuffle=False, on_error="skip")) == TEXTS[:300] + TEXTS[400:]
    remove(copy / "manifest.json")
    with pytest.raises(ValueError, match=r"s3://bucket/damaged/manifest.json: cannot be read: No such file"):
        ChunkSource(copy)
    with pytest.raises(ValueError, match=r"paths must be a folder that exists, .* got s3://bucket/nothing"):
        ChunkSource("s3://bucket/nothing")


def test_writing_goes_on_where_it_stopped(s3):
    def broken():
        yield from TEXTS[:350]
        raise KeyboardInterrupt

    url = "s3://bucket/interrupted"
    with pytest.raises(KeyboardInterrupt):
        write_chunks(broken(), url, 100, length_fn=len)
    with pytest.raises(ValueError, match="write_chunks has not finished s3://bucket/interrupted"):
        ChunkSource(url)
    written = len(s3.requests)
    with s3.fail("500", "chunk-000005", method="PUT"):
        manifest = write_chunks(TEXTS, url, 100, length_fn=len)
    put = [path for method, path in s3.requests[written:] if method == "PUT"]
    assert "/bucket/interrupted/chunk-000002.txt.gz" not in put
    assert list(ChunkSource(url, shuffle=False)) == TEXTS
    assert manifest.items == len(TEXTS)


def test_read_ahead_is_bounded_and_in_order():
    begun = []
    results = read_ahead(lambda number: (begun.append(number), number)[1], range(20), 3)
    assert next(results) == 0
    time.sleep(0.05)
    assert len(begun) <= 4
    assert list(results) == list(range(1, 20))


def test_read_ahead_stops_when_it_is_closed():
    def read(number):
        started.append(number)
        hold.wait(5)

    started, hold = [], threading.Event()
    results = read_ahead(read, itertools.count(), 2)
    threading.Timer(0.05, hold.set).start()
    next(results)
    results.close()
    count = len(started)
    time.sleep(0.05)
    assert len(started) == count
