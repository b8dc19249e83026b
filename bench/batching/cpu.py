"""Batches by length: padding on real text, and speed beside the package infinibatch on the same lengths."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from seqwarm_kernels.data.batch_planning.plan import IntArray
from seqwarm_kernels.data.batch_planning.planner import BatchPlanner
from seqwarm_kernels.data.padding import compare, histograms
from seqwarm_kernels.data.samplers.sampler import LengthBatchSampler

from ..common.records import lines_table, save, write
from ..common.timing import repeat_in_turns
from . import infinibatch
from .corpora import TOKENIZERS, BenchCorpus, corpora, many_lengths
from .files import BUDGET, WINDOW, stream
from .report import (
    FIGURE_RECORDS,
    INFINIBATCH,
    OURS,
    PACKED,
    PADDING,
    PLANNED,
    PLANNER,
    RECORDS,
    RESUMED,
    SAMPLER,
    STREAM,
)

MILLION = 1_000_000
REPEATS = 5  #: of each timing


def padding(corpus: BenchCorpus) -> Iterator[dict[str, Any]]:
    """Padding for each tokenizer: every way of batching in one window, and `BatchPlanner` in larger windows too."""
    names = ("random batches", "sorted window", "infinibatch's rule", OURS, PACKED)
    for tokenizer in TOKENIZERS:
        lengths = corpus.lengths(tokenizer)
        for window in (WINDOW, 100_000, MILLION):
            if window > WINDOW and window / 10 >= len(lengths.tokens):
                continue  # a smaller window holds all items
            for name, found in zip(names, compare(lengths.tokens, window=window), strict=True):
                if window == WINDOW or name in (OURS, PACKED):
                    figures = {
                        "items": len(lengths.tokens),
                        "mean_tokens": float(lengths.tokens.mean()),
                        "batches": len(found.items),
                        "padding": found.padding,
                        "budget_used": found.budget_used or 0.0,
                    }
                    implementation = name if window == WINDOW else f"{name}, window {window:,}"
                    yield _line(PADDING, corpus, implementation, lengths.counted, figures)


def figure_histograms(corpus: BenchCorpus) -> dict[str, Any]:
    """What the figure shows: a byte is a token, since it makes the longest items."""
    lengths, counted = corpus.lengths("bytes")
    return histograms(lengths, compare(lengths, max_tokens=BUDGET, window=WINDOW), counted)


def planned(corpus: BenchCorpus, tokenizer: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Planning of a million lengths. The implementations take turns, so that other load affects all of them equally."""
    tokens, counted = corpus.lengths(tokenizer)
    lengths = many_lengths(tokens, MILLION, BUDGET)
    planner, packer = BatchPlanner(BUDGET), BatchPlanner(BUDGET, packed=True)
    runs: dict[str, Callable[[], int]] = {
        PLANNER: lambda: _plan(lengths, planner, WINDOW),
        f"{PLANNER}, packed": lambda: _plan(lengths, packer, WINDOW),
        f"{PLANNER}, one window": lambda: _plan(lengths, planner, MILLION),
        SAMPLER: lambda: _count(LengthBatchSampler(lengths, planner, window=WINDOW, rank=0, world_size=1)),
    }
    if infinibatch.installed():
        listed, count = lengths.tolist(), _plan(lengths, planner, WINDOW)
        runs[INFINIBATCH] = lambda: _count(infinibatch.over_lengths(listed, BUDGET, WINDOW, shuffle=False))
        runs[f"{INFINIBATCH}, shuffled"] = lambda: _count(
            itertools.islice(infinibatch.over_lengths(listed, BUDGET, WINDOW, shuffle=True), count)
        )
    timed = {name: functools.partial(_timed, run) for name, run in runs.items()}
    for name, found in repeat_in_turns(timed, repeats, "implementations in turn").items():
        batches, seconds = found[0][0], median(each for _, each in found)
        figures = {"items": MILLION, "batches": batches, "seconds": seconds, "batches_per_second": batches / seconds}
        yield _line(PLANNED, corpus, name, counted, figures)


def _line(what: str, corpus: BenchCorpus, name: str, counted: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Args: counted: the unit that lengths are counted in."""
    version = infinibatch.version() if name.startswith(INFINIBATCH) and what != PADDING else ""
    found = {"what": what, "corpus": corpus.name, "implementation": name, "counted": counted}
    return {**found, "figures": figures, "version": version}


def _timed(run: Callable[[], int]) -> tuple[int, float]:
    start = time.perf_counter()
    return run(), time.perf_counter() - start


def _plan(lengths: IntArray, planner: BatchPlanner, window: int) -> int:
    """Plans every window and reads every batch of the plan. Returns the number of batches."""
    count = 0
    for begin in range(0, len(lengths), window):
        plan = planner.plan(lengths[begin : begin + window], seeds=(0, begin))
        count += sum(1 for index in range(len(plan)) if len(plan.batch(index)[0]))
    return count


def _count(batches: Any) -> int:
    return sum(1 for _ in batches)


def resumed(corpus: BenchCorpus, folder: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """Time to load a state that was taken after a million items, and to return the next batch."""
    lengths = many_lengths(corpus.lengths("bytes").tokens, 2 * MILLION, BUDGET)

    def sampler() -> LengthBatchSampler:
        return LengthBatchSampler(lengths, BatchPlanner(BUDGET), window=WINDOW, rank=0, world_size=1)

    def save(batches: Any) -> str:
        return json.dumps(batches.state_dict())

    def load(batches: Any, state: str) -> None:
        batches.load_state_dict(json.loads(state))

    yield _resumed(corpus, STREAM, lambda: stream(folder, stored_lengths=True), save, load, repeats)
    yield _resumed(corpus, f"{SAMPLER} of {len(lengths):,} items", sampler, save, load, repeats)
    if infinibatch.installed():
        yield _resumed(
            corpus,
            INFINIBATCH,
            lambda: infinibatch.over_chunks(folder, BUDGET, WINDOW, stored_lengths=False),
            lambda batches: pickle.dumps(batches.getstate()),
            lambda batches, state: batches.setstate(pickle.loads(state)),
            repeats,
        )


def _resumed(
    corpus: BenchCorpus,
    name: str,
    make: Callable[[], Any],
    save: Callable[[Any], Any],
    load: Callable[[Any, Any], None],
    repeats: int,
) -> dict[str, Any]:
    """Takes each state at another position in its window.

    Args:
        make: Returns an iterable of batches.
        save: Serializes the state of such an iterable.
        load: Restores a serialized state.
    """
    batches = make()
    iterator, items, times, state = iter(batches), 0, [], ""
    while items < MILLION:
        items += len(next(iterator))
    for _ in range(repeats):
        for _ in range(17):
            next(iterator)
        state = save(batches)
        other = make()
        start = time.perf_counter()
        load(other, state)
        batch = next(iter(other))
        times.append((time.perf_counter() - start) * 1e3)
        if batch != next(iterator):
            raise RuntimeError(f"{name} resumed at another batch")
    figures = {"milliseconds": median(times), "slowest_milliseconds": max(times), "state_bytes": len(state)}
    return _line(RESUMED, corpus, name, "bytes", figures)


def run(found: list[BenchCorpus], repeats: int) -> Iterator[dict[str, Any]]:
    """Padding on all corpora. Speed on the last corpus, which is the largest."""
    for corpus in found:
        yield from padding(corpus)
    for tokenizer in TOKENIZERS:
        yield from planned(found[-1], tokenizer, repeats)
    with tempfile.TemporaryDirectory() as folder:
        found[-1].write_chunks(Path(folder), BUDGET)
        yield from resumed(found[-1], Path(folder), 2 * repeats + 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--large", type=Path, metavar="FOLDER", help="text with at least 100,000 paragraphs")


def main(arguments: argparse.Namespace) -> None:
    found = list(corpora(arguments.large))
    if not found:
        raise SystemExit("no text found: set SEQWARM_TEST_DATA, or pass a folder with --large")
    if not infinibatch.installed():
        print("The package infinibatch is not installed. It is not measured.")
    save(RECORDS, run(found, REPEATS), lines_table)
    write(FIGURE_RECORDS, [figure_histograms(found[-1])])
