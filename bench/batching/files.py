"""From compressed files to padded tensors, beside the package infinibatch with the same reader, on one thread."""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from seqwarm_kernels.data.batch_planning.planner import BatchPlanner
from seqwarm_kernels.data.files.reader import read_chunk
from seqwarm_kernels.data.loading.collate import PaddedCollator
from seqwarm_kernels.data.samplers.stream import LengthBatchStream
from seqwarm_kernels.data.sources import chunk_source

from ..common.records import save
from ..common.timing import quartiles, repeat_in_turns
from . import infinibatch
from .corpora import BenchCorpus, corpora, count_bytes
from .report import FILES_RECORDS, INFINIBATCH, STAGES, STREAM, files_table

BUDGET, WINDOW = 16_384, 10_000
REPEATS = 5  #: of each timing


class Pipeline(NamedTuple):
    open: Callable[[], Iterable[list[Any]]]  #: returns endless batches of items
    text: Callable[[Any], str]  #: returns the text of an item


class Clock:
    """Seconds of CPU time of each stage."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._last = time.thread_time()

    def add(self, stage: str) -> None:
        """Count the time since the last call."""
        now = time.thread_time()
        self.seconds[stage] += now - self._last
        self._last = now


def stream(folder: Path, *, stored_lengths: bool) -> LengthBatchStream:
    """Endless batches of texts, or of (text, length) with the lengths of `write_chunks`."""
    source = chunk_source.ChunkSource(folder, infinite=True, with_lengths=stored_lengths)
    length = itemgetter(1) if stored_lengths else count_bytes
    return LengthBatchStream(source, BatchPlanner(BUDGET), length=length, window=WINDOW, rank=0, world_size=1)


def pipelines(folder: Path) -> dict[str, Pipeline]:
    """Ours and infinibatch's, each with items that are texts, and with the lengths of `write_chunks` beside them."""
    over_chunks = partial(infinibatch.over_chunks, folder, BUDGET, WINDOW)
    found = {
        STREAM: Pipeline(partial(stream, folder, stored_lengths=False), str),
        INFINIBATCH: Pipeline(partial(over_chunks, stored_lengths=False), str),
        f"{STREAM}, stored lengths": Pipeline(partial(stream, folder, stored_lengths=True), itemgetter(0)),
        f"{INFINIBATCH}, stored lengths": Pipeline(partial(over_chunks, stored_lengths=True), itemgetter(0)),
    }
    return {name: each for name, each in found.items() if infinibatch.installed() or not name.startswith(INFINIBATCH)}


class Run(NamedTuple):
    clock: Clock
    wall_seconds: float
    batches: int


def run(pipeline: Pipeline, windows: int) -> Run:
    """The batches of the first `windows` windows.

    A window is read and planned before its first batch, so only whole windows count the same work for every pipeline.
    """
    collate = PaddedCollator(max_tokens=BUDGET)
    gc.collect()  # the iterators of an earlier run of infinibatch are cycles
    items_left, batches = windows * WINDOW, 0
    start, clock = time.perf_counter(), Clock()

    def timed_read(*arguments: Any) -> list[Any]:
        clock.add("plan")
        items = read_chunk(*arguments)
        clock.add("read")
        return items

    with patch.object(chunk_source, "read_chunk", timed_read), patch.object(infinibatch, "read_chunk", timed_read):
        iterator = iter(pipeline.open())
        while items_left > 0:
            items = next(iterator)
            clock.add("plan")
            encoded = [_encode(pipeline.text(item)) for item in items]
            clock.add("encode")
            collate(encoded)
            clock.add("pad")
            items_left, batches = items_left - len(items), batches + 1
    return Run(clock, time.perf_counter() - start, batches)


def _encode(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode(), np.uint8)


def measure(corpus: BenchCorpus, folder: Path, windows: int, repeats: int) -> Iterator[dict[str, Any]]:
    runs = {name: partial(run, pipeline, windows) for name, pipeline in pipelines(folder).items()}
    for name, each in repeat_in_turns(runs, repeats, "pipelines in turn").items():
        cpu = quartiles([sum(one.clock.seconds.values()) for one in each])
        wall = quartiles([one.wall_seconds for one in each])
        stages = {stage: quartiles([one.clock.seconds[stage] for one in each]).median for stage in STAGES}
        version = infinibatch.version() if name.startswith(INFINIBATCH) else ""
        line = {"corpus": corpus.name, "implementation": name, "items": windows * WINDOW, "batches": each[0].batches}
        line |= {"cpu_seconds": cpu.median, "cpu_iqr": cpu.iqr, "wall_seconds": wall.median, "wall_iqr": wall.iqr}
        yield line | {"stages": stages, "repeats": repeats, "version": version}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--large", type=Path, metavar="FOLDER", help="text with at least 100,000 paragraphs")


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    *_, corpus = corpora(arguments.large)
    with tempfile.TemporaryDirectory() as folder:
        corpus.write_chunks(Path(folder), BUDGET)
        windows = math.ceil(len(corpus.items) / WINDOW)
        save(FILES_RECORDS, measure(corpus, Path(folder), windows, REPEATS), files_table)
