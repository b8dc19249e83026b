"""Reading an epoch of documents of tokens in each format, with this package's source and with the format's own library.

Both yield one document after another. Every 64 of them are joined, as collators do, so that all tokens are read.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from seqwarm_kernels.data import ChunkSource, MDSSource, MegatronSource, ParquetSource, TokenSource, write_chunks

from ..common.records import save
from ..common.timing import quartiles
from .report import CACHES, ORDERS, READERS_RECORDS, readers_table
from .token_corpus import conditions, document_lengths, drop_from_cache, token_parts

Documents = list[NDArray[np.uint16]]
TOKENS = 10_000_000  #: of the corpus
REPEATS = 5  #: of each timing


class Reader(NamedTuple):
    name: str
    version: str
    read: Callable[[bool, int], Iterable[Any]]  #: the documents, shuffled or not, in an order of a seed


class Format(NamedTuple):
    name: str
    needs: str | None  #: a package
    write: Callable[[Path, Documents], Any]
    readers: Callable[[Path, int], list[Reader]]  #: of the folder, and of the number of documents


def _order(shuffled: bool, seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).permutation(count).tolist() if shuffled else list(range(count))


def _ours(open_source: Callable[..., Any]) -> Reader:
    def read(shuffled: bool, seed: int) -> Iterable[Any]:
        return open_source(shuffle=shuffled, seed=seed)

    return Reader(open_source().__class__.__name__, "", read)


# ---- flat arrays


def _write_flat(folder: Path, documents: Documents) -> None:
    np.concatenate(documents).tofile(folder / "train.bin")
    np.save(folder / "ends.npy", np.cumsum([len(document) for document in documents]))


def _flat_readers(folder: Path, count: int) -> list[Reader]:
    def memmap(shuffled: bool, seed: int) -> Iterator[Any]:
        tokens = np.memmap(folder / "train.bin", np.uint16, "r")
        bounds = np.append(0, np.load(folder / "ends.npy")).tolist()
        for number in _order(shuffled, seed, count):
            yield tokens[bounds[number] : bounds[number + 1]]

    ours = _ours(lambda **settings: TokenSource(folder / "train.bin", document_ends=folder / "ends.npy", **settings))
    return [ours, Reader("numpy.memmap", f"numpy {np.__version__}", memmap)]


# ---- Megatron


def _write_megatron(folder: Path, documents: Documents) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "train.bin"), np.uint16)
    for document in documents:
        builder.add_document(torch.from_numpy(document.astype(np.int64)), [len(document)])
    builder.finalize(str(folder / "train.idx"))


def _megatron_readers(folder: Path, count: int) -> list[Reader]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    def indexed(shuffled: bool, seed: int) -> Iterator[Any]:
        data_set = IndexedDataset(str(folder / "train"))
        # `map` keeps the data set: without it, its file is unmapped below arrays that are still in use.
        return map(data_set.__getitem__, _order(shuffled, seed, count))

    ours = _ours(lambda **settings: MegatronSource(folder / "train", **settings))
    return [ours, Reader("IndexedDataset", f"megatron-core {version('megatron-core')}", indexed)]


# ---- MDS


def _write_mds(folder: Path, documents: Documents) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mds"), columns={"tokens": "ndarray:uint16"}) as writer:
        for document in documents:
            writer.write({"tokens": document})


def _mds_readers(folder: Path, count: int) -> list[Reader]:
    from streaming import LocalDataset

    def local(shuffled: bool, seed: int) -> Iterator[Any]:
        data_set = LocalDataset(str(folder / "mds"))
        yield from (data_set[number]["tokens"] for number in _order(shuffled, seed, count))

    ours = _ours(lambda **settings: MDSSource(folder / "mds", **settings))
    return [ours, Reader("LocalDataset", f"mosaicml-streaming {version('mosaicml-streaming')}", local)]


# ---- Parquet


def _write_parquet(folder: Path, documents: Documents) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"tokens": documents}), folder / "train.parquet", row_group_size=10_000)


def _parquet_readers(folder: Path, count: int) -> list[Reader]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def by_groups(shuffled: bool, seed: int) -> Iterator[Any]:
        file = pq.ParquetFile(folder / "train.parquet")
        for group in _order(shuffled, seed, file.num_row_groups):
            column = file.read_row_group(group, columns=["tokens"]).column(0).combine_chunks()
            tokens, bounds = column.values.to_numpy(), column.offsets.to_numpy().tolist()
            for number in _order(shuffled, group, len(column)):
                yield tokens[bounds[number] : bounds[number + 1]]

    ours = _ours(lambda **settings: ParquetSource(folder / "train.parquet", "tokens", **settings))
    return [ours, Reader("ParquetFile", f"pyarrow {pa.__version__}", by_groups)]


# ---- chunk files


def _write_chunks(folder: Path, documents: Documents) -> None:
    write_chunks((document.tolist() for document in documents), folder / "chunks", format="jsonl", progress=False)


def _chunk_readers(folder: Path, count: int) -> list[Reader]:
    def by_hand(shuffled: bool, seed: int) -> Iterator[Any]:
        paths = sorted(folder.glob("chunks/*.jsonl.gz"))
        for number in _order(shuffled, seed, len(paths)):
            with gzip.open(paths[number], "rt") as file:
                items = [json.loads(line) for line in file]
            yield from (items[place] for place in _order(shuffled, number, len(items)))

    ours = _ours(lambda **settings: ChunkSource(folder / "chunks", **settings))
    return [ours, Reader("gzip and json", "Python", by_hand)]


FORMATS = (
    Format("flat array, .bin", None, _write_flat, _flat_readers),
    Format("Megatron, .bin and .idx", "megatron.core", _write_megatron, _megatron_readers),
    Format("MDS, uncompressed", "streaming", _write_mds, _mds_readers),
    Format("Parquet, Snappy", "pyarrow", _write_parquet, _parquet_readers),
    Format("chunks, .jsonl.gz", None, _write_chunks, _chunk_readers),
)


def measure(tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    """The readers of a format take turns, so that other load affects all of them equally."""
    lengths = document_lengths(tokens)
    bounds = np.append(0, np.cumsum(lengths)).tolist()
    joined = np.concatenate(list(token_parts(lengths)))
    documents = [joined[begin:end] for begin, end in pairwise(bounds)]
    for each in FORMATS:
        if each.needs is not None and find_spec(each.needs.partition(".")[0]) is None:
            print(f"{each.name} is not measured: {each.needs} is not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            each.write(Path(folder), documents)
            yield from _measured(each, Path(folder), len(documents), tokens, repeats)


def _measured(each: Format, folder: Path, count: int, tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    readers = each.readers(folder, count)
    for order in ORDERS:
        for cache in CACHES:
            seconds: dict[str, list[float]] = {reader.name: [] for reader in readers}
            for repeat in tqdm(range(repeats), desc=f"{each.name}, {order}, {cache}", disable=None):
                for reader in readers:
                    if cache == "cold":
                        drop_from_cache(path for path in folder.rglob("*") if path.is_file())
                    seconds[reader.name].append(_timed(reader, order == "shuffled", repeat, tokens))
            for reader in readers:
                times = quartiles(seconds[reader.name])
                line: dict[str, Any] = {"format": each.name, "reader": reader.name, "version": reader.version}
                line |= {"order": order, "cache": cache, "items": count, "tokens": tokens, "seconds": times.median}
                yield line | {"iqr": times.iqr, "repeats": repeats, "conditions": conditions()}


def _timed(reader: Reader, shuffled: bool, seed: int, tokens: int) -> float:
    start, found = time.perf_counter(), 0
    documents = iter(reader.read(shuffled, seed))
    while some := list(islice(documents, 64)):
        found += len(np.concatenate(some))
    seconds = time.perf_counter() - start
    if found != tokens:
        raise RuntimeError(f"{reader.name} has read {found} tokens instead of {tokens}")
    return seconds


def main(arguments: argparse.Namespace) -> None:
    save(READERS_RECORDS, measure(TOKENS, REPEATS), readers_table)
