"""Files of sources that are cut, changed or of another format are refused with an error that names file and place."""

import gzip
import io
import json
import os
import re
import shutil
import struct
import threading

import numpy as np
import pytest

from seqwarm_kernels.data import ChunkError, ChunkSource, TokenSource, visible_files
from seqwarm_kernels.data.files.reader import iter_lines

from ..data.data_sets import FORMATS
from ..data.token_files import END, documents, ends, write_llm_c, write_mds
from .mutations import EXAMPLES, changed, damaged, explore, refusal_of

DOCUMENTS = documents(100)
TOKENS = int(ends(DOCUMENTS)[-1])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class DataSet:
    """A data set of `DOCUMENTS` in a format, and its files by their names."""

    def __init__(self, name, tmp_path):
        self.name, self._cache, folder = name, tmp_path / "cache", tmp_path / "data"
        folder.mkdir()
        write, self._open = FORMATS[name]
        self._path = write(folder, DOCUMENTS)
        self.files = {file.name: file for file in visible_files(folder)}

    def open(self):
        return self._open(self._path, shuffle=False)

    def read(self, source=None):
        """Read all documents and lengths, which must fit."""
        shutil.rmtree(self._cache, ignore_errors=True)  # of unpacked shards
        source = source or self.open()
        items = list(source)
        assert self.name == "chunks" or [len(item) for item in items] == source.lengths().tolist()


@pytest.fixture(params=[name for name in FORMATS if name not in ("sequence", "stream")])
def data_set(request, tmp_path):
    return DataSet(request.param, tmp_path)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_bytes(data_set, examples):
    """Tokens have no checksum, so another token is not noticed. The number of tokens is, but for a file without any."""
    for path in data_set.files.values():
        content = path.read_bytes()

        def check(example, path=path, content=content):
            path.write_bytes(example)
            refusal = refusal_of(data_set.read)
            assert refusal is None or str(path.parent) in refusal
            is_counted = data_set.name != "flat" and path.name != "manifest.json"
            assert refusal is not None or len(example) >= len(content) or not is_counted

        explore(examples, damaged(content), check)
        path.write_bytes(content)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_changed_entries_of_an_index_of_mds(tmp_path, examples):
    data_set = DataSet("mds", tmp_path)
    path = data_set.files["index.json"]

    def check(example):
        path.write_text(json.dumps(example, default=str))
        refusal = refusal_of(data_set.read)
        assert refusal is None or str(path.parent) in refusal

    explore(examples, changed(json.loads(path.read_text())), check)


def test_a_file_that_is_missing_empty_or_a_folder(data_set):
    if data_set.name in ("parquet", "row groups"):
        return  # any files of a folder are read
    for path in data_set.files.values():
        content = path.read_bytes()
        for change, problem in (
            (path.unlink, ": .*No such file or directory"),
            (path.touch, ""),
            (lambda path=path: (path.unlink(), path.mkdir()), ": .*Is a directory"),
        ):
            change()
            with pytest.raises(ValueError, match=f"{re.escape(str(path))}{problem}"):
                data_set.read()
        path.rmdir()
        path.write_bytes(content)


def test_a_file_that_is_cut_while_its_source_is_open(data_set):
    for path in data_set.files.values():
        if path.suffix in (".idx", ".json", ".zstd") or path.name == "b.parquet":
            continue  # read at the beginning, or without rows
        source, content = data_set.open(), path.read_bytes()
        list(source)
        os.truncate(path, len(content) - 10)
        with pytest.raises(ChunkError, match=str(path)):
            data_set.read(source)
        path.write_bytes(content)


# ---- lines


@pytest.mark.parametrize("name", ["lines.txt", "lines.txt.gz"])
def test_a_file_without_a_manifest_that_is_cut_while_its_source_is_open(tmp_path, name):
    path = tmp_path / name
    first, second = (gzip.compress(part) if name.endswith("gz") else part for part in (b"a\n", b"b\n"))
    path.write_bytes(first + second)
    source = ChunkSource(path)
    assert sorted(source) == ["a", "b"]
    path.write_bytes(first)  # has nothing else that shows that a line is missing
    with pytest.raises(ChunkError, match=f"{path}: the file has {len(first)} bytes, expected"):
        list(source)


def test_a_compressed_file_that_is_cut_while_it_is_read(tmp_path):
    path = tmp_path / "lines.txt.gz"
    path.write_bytes(gzip.compress("\n".join(f"line {number}" for number in range(100_000)).encode()))
    lines = iter_lines(path)
    next(lines)
    os.truncate(path, path.stat().st_size * 3 // 4)
    with pytest.raises(ChunkError, match=str(path)):
        list(lines)


def test_a_pipe_is_read_to_its_end(tmp_path):
    path = tmp_path / "lines.txt"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("a\nb\n",))
    writer.start()
    assert [line for _, line in iter_lines(path)] == ["a", "b"]
    writer.join()


# ---- the place in a file


def patched(content, byte, layout, value):
    size = struct.calcsize(layout)
    return content[:byte] + struct.pack(layout, value) + content[byte + size :]


def npy_of(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


LENGTHS, POINTERS, INDICES = 34, 34 + 4 * 100, 34 + 12 * 100  # where they begin in an index of 100 documents


#: By a name of ours: the format, and the file.
FILES = {
    "idx": ("megatron", "train.idx"),
    "bin": ("megatron", "train.bin"),
    "flat": ("flat", "train.bin"),
    "npy": ("npy", "train.npy"),
    "shard": ("mds", "shard.00000.mds"),
    "zipped": ("zipped mds", "shard.00000.mds.zstd"),
}


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("idx", (9, "<Q", 2), "at byte 9,"),
        *(("idx", (17, "B", code), "at byte 17,") for code in (6, 9)),
        *(("idx", (18, "<Q", 99), "at byte 2,030,"), ("idx", (18, "<Q", 2**60), "at byte 2,042,")),
        ("idx", (LENGTHS + 8, "<i", -5), f"at byte {LENGTHS + 8},"),
        ("idx", (POINTERS + 24, "<q", 1), f"at byte {POINTERS + 24},"),
        *(("idx", (INDICES + at, "<q", 3), f"at byte {INDICES + at:,},") for at in (0, 40)),
        ("idx", (INDICES + 800, "<q", 99), f"at byte {INDICES + 800:,},"),
        ("idx", lambda content: content[:18] + struct.pack("<QQQ", 0, 1, 0), "the index has no documents"),
        ("idx", lambda content: content.replace(b"MMIDIDX", b"OTHERXX"), "at byte 0,"),
        ("bin", lambda content: content[:-8], f"at byte {2 * TOKENS - 8:,},"),
        ("flat", lambda content: content[:-1], f"at byte {2 * TOKENS - 1:,},"),
        ("flat", lambda content: b"text " * 100, f"token {END} "),
        ("flat", lambda content: gzip.compress(bytes(100)), "at byte 0, .*gzip"),
        ("flat", lambda content: b"PK\x03\x04" + bytes(100), "at byte 0, .*zip"),
        ("flat", lambda content: b"PAR1" + bytes(100), "at byte 0, .*Parquet"),
        ("flat", lambda content: b"MMIDIDX\x00\x00" + bytes(99), "at byte 0, .*Megatron"),
        *(("npy", lambda content, a=a: npy_of(a), "at byte 0,") for a in (np.zeros((3, 4), int), np.zeros(3))),
        ("npy", lambda content: npy_of(np.zeros(3, "M8[s]")), "at byte 0,"),
        *(("shard", (at, "<I", value), f"at byte {at},") for at, value in ((0, 5), (4, 1), (12, 3), (12, 10**6))),
        ("zipped", lambda content: content[:-5], "damaged"),
    ],
)
def test_the_place_in_a_file(tmp_path, file, change, named):
    name, file_name = FILES[file]
    data_set = DataSet(name, tmp_path)
    path = data_set.files[file_name]
    content = path.read_bytes()
    path.write_bytes(change(content) if callable(change) else patched(content, *change))
    with pytest.raises(ChunkError, match=f"{path.name}: .*{named}"):
        data_set.read()


@pytest.mark.parametrize(("byte", "value", "named"), [(4, 2, "4"), (8, -1, "1,022"), (8, 10, "1,044")])
def test_the_place_in_a_header_of_llm_c(tmp_path, byte, value, named):
    path = write_llm_c(tmp_path, DOCUMENTS)
    path.write_bytes(patched(path.read_bytes(), byte, "<i", value))
    with pytest.raises(ChunkError, match=f"{path}: at byte {named},"):
        TokenSource(path, end_token=END)


def test_ends_in_a_file_of_another_format(tmp_path):
    path, found = write_llm_c(tmp_path, DOCUMENTS), tmp_path / "ends.npy"
    found.write_bytes(b"PAR1 and more")
    with pytest.raises(ChunkError, match=f"{found}: document_ends"):
        TokenSource(path, document_ends=found)


def test_a_sample_that_is_damaged(tmp_path):
    path = write_mds(tmp_path, DOCUMENTS) / "shard.00001.mds"
    content = path.read_bytes()
    (begin,) = struct.unpack("<I", content[4:8])
    path.write_bytes(patched(content, begin, "<I", 10**6))
    with pytest.raises(ChunkError, match=f"{path}: at byte {begin:,}, sample 0 "):
        list(FORMATS["mds"][1](path.parent))
