"""resize_batch on the CPU beside what people write by hand."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from seqwarm_kernels import resize_batch

from .measure import Record, measure, table, write

Batch = dict[str, Tensor]

#: rows, tokens, new length, mode
CASES = [
    (8, 128, 64, "truncate"),
    (64, 1024, 512, "truncate"),
    (2048, 2048, 1024, "truncate"),
    (64, 1024, 64, "reshape"),
    (2048, 2048, 256, "reshape"),
]


def language_model_batch(rows: int, tokens: int) -> Batch:
    names = ("input_ids", "attention_mask", "labels")
    return {name: torch.randint(1000, (rows, tokens)) for name in names}


def slice_and_copy(batch: Batch, length: int, mode: str) -> Batch:
    """The Python that resize_batch replaces. Whole rows only, so that reshape needs no slice."""
    if mode == "truncate":
        return {name: tensor[:, :length].contiguous() for name, tensor in batch.items()}
    return {name: tensor.view(-1, length).clone() for name, tensor in batch.items()}


def implementations(batch: Batch, length: int, mode: str) -> Iterator[tuple[str, Callable[[], Batch]]]:
    out = {name: torch.empty_like(tensor) for name, tensor in batch.items()}
    yield "slice + contiguous", lambda: slice_and_copy(batch, length, mode)
    yield "resize_batch native", lambda: resize_batch(batch, length, mode=mode, backend="native")
    yield "resize_batch native, out=", lambda: resize_batch(batch, length, mode=mode, out=out, backend="native")
    yield "resize_batch reference", lambda: resize_batch(batch, length, mode=mode, backend="reference")
    yield "resize_batch views", lambda: resize_batch(batch, length, mode=mode, copy=False)


def run(seconds: float) -> list[Record]:
    records = []
    for rows, tokens, length, mode in tqdm(CASES, desc="resize_batch", unit="case"):
        batch = language_model_batch(rows, tokens)
        expected = slice_and_copy(batch, length, mode)
        case = f"{mode} 3 x {rows} x {tokens} int64 to {length}"
        for name, call in implementations(batch, length, mode):
            if any(not torch.equal(tensor, expected[key]) for key, tensor in call().items()):
                raise RuntimeError(f"{name} gives another batch than slice + contiguous on {case}")
            for threads in (1, 2):
                records.append(
                    measure(
                        call, operator="resize_batch", case=case, implementation=name, threads=threads, seconds=seconds
                    )
                )
    return records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time of each row of the table")


def main(arguments: argparse.Namespace) -> None:
    records = run(arguments.seconds)
    path = write("cpu_resize_batch", records)
    print(f"{table(records)}\n\nwritten to {path}")
