"""Files of tokens that are cut, changed or of another format are refused with an error that names file and place."""

import gzip
import io
import json
import re
import shutil
import struct

import numpy as np
import pytest

from seqwarm_kernels.data import ChunkError, MDSSource, MegatronSource, TokenSource

from ..data.token_files import (
    END,
    documents,
    ends,
    need_mds,
    write_flat,
    write_llm_c,
    write_mds,
    write_megatron,
    write_npy,
)
from .mutations import EXAMPLES, changed, damaged, explore, refusal_of

DOCUMENTS = documents(100)
TOKENS = int(ends(DOCUMENTS)[-1])


def flat(path):
    return TokenSource(path, end_token=END, shuffle=False)


def given_ends(path):
    return TokenSource(path, document_ends=ends(DOCUMENTS), shuffle=False)


def megatron(path):
    return MegatronSource(path, shuffle=False)


def mds(path):
    return MDSSource(path.parent, shuffle=False)


def write_idx(folder, made):
    return write_megatron(folder, made).with_suffix(".idx")


def write_bin(folder, made):
    return write_megatron(folder, made).with_suffix(".bin")


def write_index_json(folder, made):
    return write_mds(folder, made) / "index.json"


def write_zipped_index(folder, made):
    return write_mds(folder, made, compression="gz") / "index.json"


def write_zipped_shard(folder, made):
    return write_mds(folder, made, compression="zstd") / "shard.00001.mds.zstd"


def write_shard(folder, made):
    return write_mds(folder, made) / "shard.00001.mds"


#: By name: writes a data set and returns one of its files, and opens the data set of that file.
FILES = {
    "flat": (write_flat, flat),
    "llm.c": (write_llm_c, flat),
    "npy": (write_npy, given_ends),
    "megatron idx": (write_idx, megatron),
    "megatron bin": (write_bin, megatron),
    "mds index": (write_index_json, mds),
    "mds shard": (write_shard, mds),
    "mds zipped index": (write_zipped_index, mds),
    "mds zipped shard": (write_zipped_shard, mds),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=FILES)
def data_set(request, tmp_path):
    if request.param.startswith("mds"):
        need_mds()
    write, source = FILES[request.param]
    return write(tmp_path, DOCUMENTS), source


def read(path, source):
    """All documents and lengths, which must fit."""
    opened = source(path)
    items, lengths = list(opened), opened.lengths()
    assert [len(item) for item in items] == lengths.tolist()
    return items


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_bytes(data_set, examples):
    """Tokens have no checksum, so another token is not noticed. The number of tokens is."""
    path, source = data_set
    content = path.read_bytes()

    def check(example):
        path.write_bytes(example)
        shutil.rmtree(path.parent.parent / "cache", ignore_errors=True)  # of unpacked shards
        refusal = refusal_of(lambda: read(path, source))
        assert refusal is None or str(path.parent) in refusal
        if len(example) < len(content) and source is not flat:
            assert refusal is not None

    explore(examples, damaged(content), check)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_changed_entries_of_an_index_of_mds(tmp_path, examples):
    need_mds()
    path = write_index_json(tmp_path, DOCUMENTS)

    def check(example):
        path.write_text(json.dumps(example, default=str))
        refusal = refusal_of(lambda: read(path, mds))
        assert refusal is None or str(path.parent) in refusal

    explore(examples, changed(json.loads(path.read_text())), check)


def test_a_file_that_is_missing_empty_or_a_folder(data_set):
    path, source = data_set
    for change, problem in (
        (path.unlink, ": cannot be read: No such file or directory"),
        (path.touch, ""),
        (lambda: (path.unlink(), path.mkdir()), ": cannot be read: Is a directory"),
    ):
        change()
        with pytest.raises(ValueError, match=re.escape(f"{path}{problem}")):
            read(path, source)


def test_a_file_that_is_cut_while_it_is_read(data_set):
    path, source = data_set
    if path.suffix in (".idx", ".json", ".zstd"):
        return  # read at the beginning
    opened = source(path)
    opened.lengths()
    size = path.stat().st_size - 10
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(ChunkError, match=f"{path}: at byte {size:,}, the file ends, [0-9,]+ bytes are needed"):
        list(opened)


def patched(content, byte, layout, value):
    size = struct.calcsize(layout)
    return content[:byte] + struct.pack(layout, value) + content[byte + size :]


def npy_of(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


LENGTHS, POINTERS, INDICES = 34, 34 + 4 * 100, 34 + 12 * 100  # where they begin in an index of 100 documents


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        *(("megatron idx", (9, "<Q", 2), "at byte 9,"), ("megatron idx", (17, "B", 6), "at byte 17,")),
        *(("megatron idx", (17, "B", 9), "at byte 17,"), ("megatron idx", (18, "<Q", 99), "at byte 2,030,")),
        ("megatron idx", (18, "<Q", 2**60), "at byte 2,042,"),
        ("megatron idx", (LENGTHS + 8, "<i", -5), f"at byte {LENGTHS + 8},"),
        ("megatron idx", (POINTERS + 24, "<q", 1), f"at byte {POINTERS + 24},"),
        *(("megatron idx", (INDICES + at, "<q", 3), f"at byte {INDICES + at:,},") for at in (0, 40)),
        ("megatron idx", (INDICES + 800, "<q", 99), f"at byte {INDICES + 800:,},"),
        ("megatron idx", lambda content: content.replace(b"MMIDIDX", b"OTHERXX"), "at byte 0,"),
        ("megatron bin", lambda content: content[:-8], f"at byte {2 * TOKENS - 8:,},"),
        ("llm.c", (4, "<i", 2), "at byte 4,"),
        ("llm.c", (8, "<i", -1), "at byte 1,022,"),
        ("llm.c", (8, "<i", 10), "at byte 1,044,"),
        ("flat", lambda content: content[:-1], f"at byte {2 * TOKENS - 1:,},"),
        ("flat", lambda content: b"text " * 100, f"token {END} "),
        ("flat", lambda content: gzip.compress(bytes(100)), "at byte 0, .*gzip"),
        ("flat", lambda content: b"PK\x03\x04" + bytes(100), "at byte 0, .*zip"),
        ("flat", lambda content: b"PAR1" + bytes(100), "at byte 0, .*Parquet"),
        ("flat", lambda content: b"MMIDIDX\x00\x00" + bytes(99), "at byte 0, .*Megatron"),
        *(("npy", lambda content, a=a: npy_of(a), "at byte 0,") for a in (np.zeros((3, 4), int), np.zeros(3))),
        ("npy", lambda content: npy_of(np.zeros(3, "M8[s]")), "at byte 0,"),
        ("mds zipped shard", lambda content: content[:-5], "damaged"),
    ],
)
def test_the_place_in_a_file(tmp_path, name, change, named):
    if name.startswith("mds"):
        need_mds()
    write, source = FILES[name]
    path = write(tmp_path, DOCUMENTS)
    content = path.read_bytes()
    path.write_bytes(change(content) if callable(change) else patched(content, *change))
    with pytest.raises(ChunkError, match=f"{path}: .*{named}"):
        read(path, source)


def test_ends_in_a_file_of_another_format(tmp_path):
    path, found = write_flat(tmp_path, DOCUMENTS), tmp_path / "ends.npy"
    found.write_bytes(b"PAR1 and more")
    with pytest.raises(ChunkError, match=f"{found}: document_ends"):
        TokenSource(path, document_ends=found)


@pytest.mark.parametrize(
    ("byte", "value"),
    [(0, 5), (4, 1), (12, 3), (12, 10**6)],
)
def test_the_place_in_a_shard(tmp_path, byte, value):
    need_mds()
    path = write_shard(tmp_path, DOCUMENTS)
    path.write_bytes(patched(path.read_bytes(), byte, "<I", value))
    for use in (lambda source: source.lengths(), list):
        with pytest.raises(ChunkError, match=f"{path}: at byte {byte},"):
            use(mds(path))


def test_a_sample_that_is_damaged(tmp_path):
    need_mds()
    path = write_shard(tmp_path, DOCUMENTS)
    content = path.read_bytes()
    (begin,) = struct.unpack("<I", content[4:8])
    path.write_bytes(patched(content, begin, "<I", 10**6))
    with pytest.raises(ChunkError, match=f"{path}: at byte {begin:,}, sample 0 "):
        list(mds(path))
