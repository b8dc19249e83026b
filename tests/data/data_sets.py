"""Data sets of the same documents for every source: written to a folder, and opened."""

import json

import pytest

from seqwarm_kernels.data import (
    ChunkSource,
    MDSSource,
    MegatronSource,
    ParquetSource,
    SequenceSource,
    StreamSource,
    TokenSource,
    write_chunks,
)
from seqwarm_kernels.data.files.remote import check_location

from .made import Stream
from .token_files import END, need_mds, write_flat, write_mds, write_megatron, write_merged_mds, write_npy


def write_jsonl(folder, made):
    write_chunks([document.tolist() for document in made], folder / "chunks", 50, format="jsonl", progress=False)
    return folder / "chunks"


def write_parquet(folder, made):
    pytest.importorskip("pyarrow")
    write_chunks(made, folder / "parquet", 50, format="parquet", progress=False)
    return folder / "parquet"


def write_row_groups(folder, made):
    """Two files of several row groups, and one without rows between them."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    half = len(made) // 2
    for name, part in (("a", made[:half]), ("b", []), ("c", made[half:])):
        table = pa.table({"ids": pa.array(part, pa.list_(pa.uint16()))})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=26)
    return folder


def write_zipped_mds(folder, made):
    return write_merged_mds(folder / "merged", [made[:99], made[99:]], compression="zstd")


def write_json(folder, made):
    path = folder / "documents.json"
    path.write_text(json.dumps([document.tolist() for document in made]))
    return path


def opener(make, **defaults):
    return lambda path, **settings: make(path, **{**defaults, **settings})


def open_mds(path, **settings):
    need_mds()
    return MDSSource(path, **settings)


def open_json(make):
    return lambda path, **settings: make(json.loads(check_location("path", path).read_bytes()), **settings)


open_flat = opener(TokenSource, end_token=END, buffer_size=150)

#: By name: writes documents to a folder and returns their path, and opens a source of it.
FORMATS = {
    "chunks": (write_jsonl, opener(ChunkSource, buffer_chunks=3)),
    "parquet": (write_parquet, opener(ParquetSource, buffer_chunks=3)),
    "row groups": (write_row_groups, opener(ParquetSource, buffer_chunks=3)),
    "flat": (write_flat, open_flat),
    "npy": (write_npy, open_flat),
    "megatron": (write_megatron, opener(MegatronSource, buffer_size=150)),
    "mds": (write_mds, opener(open_mds, buffer_size=150)),
    "zipped mds": (write_zipped_mds, opener(open_mds, buffer_size=150)),
    "sequence": (write_json, open_json(SequenceSource)),
    "stream": (
        write_json,
        open_json(opener(lambda items, **settings: StreamSource(Stream(items), **settings), buffer_size=150)),
    ),
}
