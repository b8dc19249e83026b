"""A corpus of a billion tokens: time to the first batch, time to resume, and memory, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from seqwarm_kernels.data import (
    BatchPlanner,
    ItemDataset,
    LengthBatchSampler,
    LengthBatchStream,
    PackedCollator,
    Prepare,
    ResumableLoader,
    TokenSource,
)

from ..common.records import save
from ..common.timing import memory_bytes, quartiles
from .report import LARGE_RECORDS, large_corpus_table
from .token_corpus import END_TOKEN, conditions, document_lengths, drop_from_cache, write_flat

BUDGET, WINDOW = 16_384, 10_000
TOKENS = 10**9  #: of the corpus
REPEATS = 5  #: of each timing


def loader(path: Path) -> ResumableLoader:
    """Packed batches of a shuffled epoch."""
    source = TokenSource(path, end_token=END_TOKEN)
    planner = BatchPlanner(BUDGET, too_long="truncate", packed=True)
    stream = LengthBatchStream(source, planner, window=WINDOW, rank=0, world_size=1)
    return ResumableLoader(DataLoader(ItemDataset(), batch_sampler=stream, collate_fn=Prepare(PackedCollator())))


def first_batch(path: Path) -> dict[str, float]:
    """Opens the source and serves one batch."""
    start = time.perf_counter()
    next(iter(loader(path)))
    return {"seconds": time.perf_counter() - start}


def planned(path: Path) -> dict[str, float]:
    """Plans every batch of an epoch from the lengths."""
    start = time.perf_counter()
    lengths = TokenSource(path, end_token=END_TOKEN).lengths()
    sampler = LengthBatchSampler(
        lengths, BatchPlanner(BUDGET, too_long="truncate", packed=True), window=WINDOW, rank=0, world_size=1
    )
    batches = sum(1 for _ in sampler)
    return {"seconds": time.perf_counter() - start, "batches": batches}


def served(path: Path, states: Path, positions: int) -> dict[str, float]:
    """Serves half an epoch, and saves states on the way."""
    batches, start = loader(path), time.perf_counter()
    tokens, total = 0, path.stat().st_size // 2
    for number, batch in enumerate(batches):
        tokens += batch["input_ids"].numel()
        if number % 997 == 0:
            states.write_text(json.dumps(batches.state_dict()))
        if tokens > total // 2:
            break
    seconds = time.perf_counter() - start
    found = []
    iterator = iter(batches)
    for _ in range(positions):
        for _ in range(61):
            next(iterator)
        state = batches.state_dict()
        found.append({"state": state, "next": next(iterator)["input_ids"].sum().item()})
    states.write_text(json.dumps(found))
    return {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}


def resumed(path: Path, states: Path, number: int) -> dict[str, float]:
    """Loads a state of the middle of the epoch, and serves the next batch."""
    saved = json.loads(states.read_text())[number]
    start = time.perf_counter()
    batches = loader(path)
    opened = time.perf_counter()
    batches.load_state_dict(saved["state"])
    batch = next(iter(batches))
    end = time.perf_counter()
    if batch["input_ids"].sum().item() != saved["next"]:
        raise RuntimeError("resumed at another batch")
    return {"seconds": end - opened, "with_opening_seconds": end - start}


def in_process(function: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """The result of a function in a new process, and the memory of that process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measured, function, arguments).result()


def _measured(function: Callable[..., dict[str, float]], arguments: tuple[Any, ...]) -> dict[str, float]:
    torch.set_num_threads(1)
    before = memory_bytes("VmRSS")
    found = function(*arguments)
    return {
        **found,
        "peak_megabytes": memory_bytes("VmHWM") / 2**20,
        "anonymous_megabytes": memory_bytes("RssAnon") / 2**20,
        "imports_megabytes": before / 2**20,
    }


def measure(path: Path, tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    lengths = document_lengths(tokens)
    states, documents = path.with_suffix(".states.json"), len(lengths)

    def line(what: str, cache: str, runs: list[dict[str, float]]) -> dict[str, Any]:
        times = quartiles([run["seconds"] for run in runs])
        figures = {name: quartiles([run[name] for run in runs]).median for name in runs[0] if name != "seconds"}
        figures["peak_megabytes"] = max(run["peak_megabytes"] for run in runs)
        found = {"what": what, "tokens": tokens, "documents": documents, "cache": cache, "seconds": times.median}
        return {**found, "iqr": times.iqr, "figures": figures, "repeats": len(runs), "conditions": conditions()}

    def repeated(cache: str, run: Callable[[int], dict[str, float]]) -> list[dict[str, float]]:
        found = []
        for number in tqdm(range(repeats), desc=cache, disable=None):
            if cache == "cold":
                drop_from_cache([path, *path.parent.glob("*.npz")])
            found.append(run(number))
        return found

    def search(_: int) -> dict[str, float]:
        for index in path.parent.glob("*.npz"):
            index.unlink()
        return in_process(first_batch, path)

    for cache in ("cold", "warm"):
        yield line("first batch, documents not searched yet", cache, repeated(cache, search))
    for cache in ("cold", "warm"):
        yield line("first batch", cache, repeated(cache, lambda _: in_process(first_batch, path)))
    yield line("plan of an epoch", "warm", repeated("warm", lambda _: in_process(planned, path)))
    yield line("half an epoch", "warm", [in_process(served, path, states, repeats)])
    for cache in ("cold", "warm"):
        yield line("resume", cache, repeated(cache, lambda number: in_process(resumed, path, states, number)))


def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_flat(Path(folder) / "train.bin", document_lengths(TOKENS))
        save(LARGE_RECORDS, measure(path, TOKENS, REPEATS), large_corpus_table)
