"""Text in chunk files, in Parquet and in an Arrow data set of Hugging Face: size, and time of reading an epoch."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow

from seqwarm_kernels.data import ChunkSource, ParquetSource, SequenceSource, write_chunks

from ..common.records import save
from ..common.timing import quartiles, repeat_in_turns
from .corpora import corpora, count_bytes
from .report import TEXT_FILES_RECORDS, text_files_table

ORDERS = {"file order": False, "shuffled": True}
COPIES = 20  #: of WikiText-2's validation part
REPEATS = 7  #: of each timing


class Format(NamedTuple):
    name: str
    version: str
    write: Callable[[list[str], Path, int], object]  #: the items, the folder, and the items of a chunk
    open: Callable[..., Any]  #: the source, of the folder and the options of its order


def _chunks(items: list[str], folder: Path, rows: int, **options: Any) -> None:
    write_chunks(items, folder, rows, length_fn=count_bytes, progress=False, **options)


def _arrow(items: list[str], folder: Path, rows: int) -> None:
    lengths = list(map(count_bytes, items))
    datasets.Dataset.from_dict({"text": items, "length": lengths}).save_to_disk(folder)


def _read_arrow(folder: Path, **options: Any) -> Iterator[tuple[str, int]]:
    rows = SequenceSource(datasets.load_from_disk(str(folder)), **options)
    return ((row["text"], row["length"]) for row in rows)


def formats() -> list[Format]:
    read_chunks = partial(ChunkSource, with_lengths=True)
    read_parquet = partial(ParquetSource, column="text", length_column="length", with_lengths=True)
    parquet_version = f"pyarrow {pyarrow.__version__}"
    return [
        *(
            Format(f"chunks, .txt{suffix}", "", partial(_chunks, compression=compression), read_chunks)
            for compression, suffix in (("gz", ".gz"), ("zst", ".zst"), ("none", ""))
        ),
        *(
            Format(
                f"Parquet, {name}",
                parquet_version,
                partial(_chunks, format="parquet", compression=compression),
                read_parquet,
            )
            for compression, name in (("gz", "gzip"), ("zst", "zstd"), ("none", "uncompressed"))
        ),
        Format("Arrow, SequenceSource", f"datasets {datasets.__version__}", _arrow, _read_arrow),
    ]


def measure(copies: int, repeats: int) -> Iterator[dict[str, Any]]:
    """A chunk is one copy, in another order."""
    corpus = next(corpora(None))
    lines, items = corpus.items, []
    for copy in range(copies):
        items += random.Random(copy).sample(lines, len(lines))
    with tempfile.TemporaryDirectory() as root:
        folders = {each: Path(root, str(number)) for number, each in enumerate(formats())}
        for each, folder in folders.items():
            each.write(items, folder, len(lines))
        names = {f"{each.name}, {order}": (each, order) for each in folders for order in ORDERS}
        runs = {
            name: partial(_read, partial(each.open, folders[each], shuffle=ORDERS[order]), items)
            for name, (each, order) in names.items()
        }
        for name, found in repeat_in_turns(runs, repeats, "formats in turn").items():
            each, order = names[name]
            seconds = quartiles(found)
            size = sum(path.stat().st_size for path in folders[each].rglob("*") if path.is_file())
            line: dict[str, Any] = {"corpus": f"{corpus.name}, {copies} times", "format": each.name}
            line |= {"version": each.version, "order": order, "items": len(items), "bytes": size}
            line |= {"text_bytes": sum(map(count_bytes, items)), "seconds": seconds.median}
            yield line | {"iqr": seconds.iqr, "repeats": repeats}


def _read(open_source: Callable[[], Any], items: list[str]) -> float:
    """Seconds of CPU time of an epoch."""
    source, start, found, tokens = open_source(), time.process_time(), 0, 0
    for _, length in source:
        found, tokens = found + 1, tokens + length
    seconds = time.process_time() - start
    if found != len(items):
        raise RuntimeError(f"{found} items were read instead of {len(items)}")
    return seconds


def main(arguments: argparse.Namespace) -> None:
    datasets.disable_progress_bars()
    save(TEXT_FILES_RECORDS, measure(COPIES, REPEATS), text_files_table)
