"""Files of tokens that are cut, changed or of another format are refused with an error that names file and place."""

import gzip
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


FOREIGN = {
    "gzip": (gzip.compress(bytes(100)), "the file begins as a gzip file"),
    "zip": (b"PK\x03\x04" + bytes(100), "the file begins as a zip file, such as .npz"),
    "Parquet": (b"PAR1" + bytes(100), "the file begins as a Parquet file"),
    "Megatron": (b"MMIDIDX\x00\x00" + bytes(99), "the file begins as an index of Megatron"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_files_of_another_format(tmp_path, kind):
    content, problem = FOREIGN[kind]
    path = tmp_path / "train.bin"
    path.write_bytes(content)
    with pytest.raises(ChunkError, match=f"{path}: at byte 0, {problem}"):
        flat(path)
    path = path.with_suffix(".idx")
    path.write_bytes(content.replace(b"MMIDIDX", b"OTHERXX"))
    with pytest.raises(ChunkError, match=rf"{path}: at byte 0, an index of Megatron begins with b'MMIDIDX.* got b"):
        megatron(path)


def test_a_text_without_the_token(tmp_path):
    path = tmp_path / "train.bin"
    path.write_text("text " * 100)
    problem = f"token {END} is not among the 250 tokens of uint16: end_token or dtype must be another one"
    with pytest.raises(ChunkError, match=f"{path}: {problem}"):
        flat(path)


def patched(content, byte, layout, value):
    size = struct.calcsize(layout)
    return content[:byte] + struct.pack(layout, value) + content[byte + size :]


LENGTHS, POINTERS, INDICES = 34, 34 + 4 * 100, 34 + 12 * 100  # where they begin in an index of 100 documents


@pytest.mark.parametrize(
    ("byte", "layout", "value", "message"),
    [
        (9, "<Q", 2, "at byte 9, the version is 2, expected 1"),
        (17, "B", 6, "at byte 17, the code of the dtype is 6, ints have [1, 2, 3, 4, 5, 8]"),
        (17, "B", 9, "at byte 17, the code of the dtype is 9, ints have"),
        (18, "<Q", 99, "at byte 2,030, 99 sequences and 101 document indices need 2,030 bytes, the file has 2,042"),
        (18, "<Q", 2**60, "at byte 2,042, 1,152,921,504,606,846,976 sequences and 101 document indices need"),
        (LENGTHS + 8, "<i", -5, f"at byte {LENGTHS + 8}, a length is negative: number 2 is -5"),
        (POINTERS + 24, "<q", 1, f"at byte {POINTERS + 24}, a sequence does not begin where the one before it ends"),
        (INDICES, "<q", 1, f"at byte {INDICES:,}, document indices must rise from 0 to 100: number 0 is 1"),
        (INDICES + 40, "<q", 3, f"at byte {INDICES + 40:,}, document indices must rise from 0 to 100: number 5 is 3"),
        (INDICES + 800, "<q", 99, f"at byte {INDICES + 800:,}, document indices must rise from 0 to 100: number 100"),
    ],
)
def test_the_place_in_an_index_of_megatron(tmp_path, byte, layout, value, message):
    path = write_idx(tmp_path, DOCUMENTS)
    path.write_bytes(patched(path.read_bytes(), byte, layout, value))
    with pytest.raises(ChunkError, match=re.escape(f"{path}: {message}")):
        megatron(path)


def test_tokens_of_another_index(tmp_path):
    path = write_bin(tmp_path, DOCUMENTS)
    np.concatenate(DOCUMENTS[:-1]).tofile(path)
    size = path.stat().st_size
    problem = f"train.idx has {TOKENS:,} tokens of uint16 in {2 * TOKENS:,} bytes, the file has {size:,}"
    with pytest.raises(ChunkError, match=re.escape(f"{path}: at byte {size:,}, {problem}")):
        megatron(path)


@pytest.mark.parametrize(
    ("byte", "layout", "value", "message"),
    [
        (4, "<i", 2, "at byte 4, the version of the header is 2, expected 1"),
        (8, "<i", -1, "at byte 1,022, -1 tokens of uint16 end after 1,022 bytes"),
        (8, "<i", 10, "at byte 1,044, 10 tokens of uint16 end after 1,044 bytes, the file has"),
    ],
)
def test_the_place_in_a_header_of_llm_c(tmp_path, byte, layout, value, message):
    path = write_llm_c(tmp_path, DOCUMENTS)
    path.write_bytes(patched(path.read_bytes(), byte, layout, value))
    with pytest.raises(ChunkError, match=re.escape(f"{path}: {message}")):
        flat(path)


@pytest.mark.parametrize("array", [np.zeros((3, 4), np.uint16), np.zeros(3), np.zeros(3, "M8[s]")])
def test_arrays_of_something_else(tmp_path, array):
    path = tmp_path / "train.npy"
    np.save(path, array)
    with pytest.raises(ChunkError, match=f"{path}: at byte 0, the array must hold ints in one dimension, got"):
        flat(path)


def test_half_a_token(tmp_path):
    path = write_flat(tmp_path, DOCUMENTS)
    path.write_bytes(path.read_bytes()[:-1])
    size = path.stat().st_size
    with pytest.raises(ChunkError, match=f"{path}: at byte {size:,}, {TOKENS:,} tokens of uint16 end after"):
        flat(path)


@pytest.mark.parametrize(
    ("byte", "value", "message"),
    [
        (0, 5, r"at byte 0, the file has 5 samples, index.json says \d+"),
        (4, 1, r"at byte 4, sample 0 cannot begin at byte 1"),
        (12, 3, r"at byte 12, sample 2 cannot begin at byte 3"),
        (12, 10**6, r"at byte 12, sample 2 cannot begin at byte 1,000,000"),
    ],
)
def test_the_place_in_a_shard(tmp_path, byte, value, message):
    need_mds()
    path = write_shard(tmp_path, DOCUMENTS)
    path.write_bytes(patched(path.read_bytes(), byte, "<I", value))
    for use in (lambda source: source.lengths(), list):
        with pytest.raises(ChunkError, match=f"{path}: {message}"):
            use(mds(path))


def test_a_sample_that_is_damaged(tmp_path):
    need_mds()
    path = write_shard(tmp_path, DOCUMENTS)
    content = path.read_bytes()
    (begin,) = struct.unpack("<I", content[4:8])
    path.write_bytes(patched(content, begin, "<I", 10**6))
    message = f"{path}: at byte {begin:,}, sample 0 is damaged: its columns and their sizes need 1,000,004 bytes"
    with pytest.raises(ChunkError, match=message):
        list(mds(path))


def test_ends_in_a_file_of_another_format(tmp_path):
    """The error says what the file must begin with, and nothing about loading pickles."""
    path, found = write_flat(tmp_path, DOCUMENTS), tmp_path / "ends.npy"
    found.write_bytes(b"PAR1 and more")
    with pytest.raises(ChunkError, match=f"{found}: document_ends cannot be read: the magic string is not correct"):
        TokenSource(path, document_ends=found)


def test_a_compressed_shard_that_is_damaged(tmp_path):
    need_mds()
    folder = write_mds(tmp_path, DOCUMENTS, compression="zstd")
    path = folder / "shard.00000.mds.zstd"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ChunkError, match=f"{path}: the compressed file is damaged"):
        MDSSource(folder).lengths()
