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
from .token_files import END, need_mds, write_flat, write_mds, write_megatron, write_npy


def write_jsonl(folder, made):
    write_chunks([document.tolist() for document in made], folder / "chunks", 50, format="jsonl", progress=False)
    return folder / "chunks"


def open_chunks(path, **settings):
    return ChunkSource(path, **{"buffer_chunks": 3, **settings})


def write_parquet(folder, made):
    pytest.importorskip("pyarrow")
    write_chunks(made, folder / "parquet", 50, format="parquet", progress=False)
    return folder / "parquet"


def open_parquet(path, **settings):
    return ParquetSource(path, **{"buffer_chunks": 3, **settings})


def open_flat(path, **settings):
    return TokenSource(path, end_token=END, **{"buffer_size": 150, **settings})


def open_megatron(path, **settings):
    return MegatronSource(path, **{"buffer_size": 150, **settings})


def open_mds(path, **settings):
    need_mds()
    return MDSSource(path, **{"buffer_size": 150, **settings})


def write_json(folder, made):
    path = folder / "documents.json"
    path.write_text(json.dumps([document.tolist() for document in made]))
    return path


def open_sequence(path, **settings):
    return SequenceSource(json.loads(check_location("path", path).read_bytes()), **settings)


def open_stream(path, **settings):
    stream = Stream(json.loads(check_location("path", path).read_bytes()))
    return StreamSource(stream, **{"buffer_size": 150, **settings})


#: By name: writes documents to a folder and returns their path, and opens a source of it.
FORMATS = {
    "chunks": (write_jsonl, open_chunks),
    "parquet": (write_parquet, open_parquet),
    "flat": (write_flat, open_flat),
    "npy": (write_npy, open_flat),
    "megatron": (write_megatron, open_megatron),
    "mds": (write_mds, open_mds),
    "sequence": (write_json, open_sequence),
    "stream": (write_json, open_stream),
}
