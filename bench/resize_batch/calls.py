"""What a call of resize_batch on a small batch costs, beside slicing by hand: copies and views of 1 to 4 tensors."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping

import torch

from seqwarm_kernels import resize_batch

from ..common.goals import Goal, goals_table, worst
from ..common.records import CpuRecord, cpu_kind, table, write
from ..common.timing import Call, measure_single_calls
from .implementations import BY_HAND, OURS, OURS_VIEWS, VIEWS, Batch
from .report import CALLS

NAMES = ("input_ids", "labels", "attention_mask", "token_type_ids")
#: rows, tokens, length
SIZES = [(2, 128, 32), (8, 128, 64), (8, 1024, 256)]
ROUNDS = 10_000
GATHER = "gather from the first valid token on"


def make_batch(tensors: int, rows: int, tokens: int, side: str) -> Batch:
    """int64 tensors. With an attention mask, the rows are padded on one side."""
    batch = {name: torch.randint(1000, (rows, tokens)) for name in NAMES[:tensors]}
    if "attention_mask" in batch:
        valid = torch.randint(tokens // 2, tokens + 1, (rows, 1))
        valid[0] = tokens
        mask = (torch.arange(tokens) < valid).long()
        batch["attention_mask"] = mask if side == "right" else mask.flip(1)
    return batch


def _copies(batch: Batch, length: int) -> Batch:
    return {name: tensor[:, :length].contiguous() for name, tensor in batch.items()}


def _views(batch: Batch, length: int) -> Batch:
    return {name: tensor[:, :length] for name, tensor in batch.items()}


def _gathered(batch: Batch, length: int) -> Batch:
    mask = batch["attention_mask"]
    first = mask.argmax(1, keepdim=True).clamp(max=mask.shape[1] - length)
    positions = first + torch.arange(length)
    return {name: tensor.gather(1, positions) for name, tensor in batch.items()}


_Cut = Callable[[Batch, int], Batch]


def cases(tensors: int) -> Iterator[tuple[str, str, Mapping[str, _Cut]]]:
    """The side of the padding, what is made, and the functions that make it, by hand first.

    Slices of rows that are padded on the left keep the padding, and a view of such rows is refused.
    """
    yield "right", "copies", {BY_HAND: _copies, OURS: resize_batch}
    yield "right", "views", {VIEWS: _views, OURS_VIEWS: functools.partial(resize_batch, copy=False)}
    if "attention_mask" in NAMES[:tensors]:
        yield "left", "copies", {BY_HAND: _copies, GATHER: _gathered, OURS: resize_batch}


def run() -> Iterator[CpuRecord]:
    torch.set_num_threads(1)
    for tensors in range(1, len(NAMES) + 1):
        for rows, tokens, length in SIZES:
            for side, made, cuts in cases(tensors):
                batch = make_batch(tensors, rows, tokens, side)
                _check(batch, length, cuts, side)
                calls: dict[str, Call] = {name: functools.partial(cut, batch, length) for name, cut in cuts.items()}
                case = f"{made}, {tensors} x {rows} x {tokens} int64 to {length}, padded {side}"
                facts = {"tensors": tensors, "rows": rows, "tokens": tokens, "length": length, "padded": side}
                for name, timing in measure_single_calls(calls, ROUNDS).items():
                    yield CpuRecord("resize_batch", case, name, 1, timing.median, timing.iqr, None, facts)


def _check(batch: Batch, length: int, cuts: Mapping[str, _Cut], side: str) -> None:
    """All must return the same tensors, apart from slices of rows that are padded on the left."""
    results = [cut(batch, length) for name, cut in cuts.items() if side == "right" or name != BY_HAND]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def goals(records: list[CpuRecord]) -> Iterator[Goal]:
    by_hand = {record.case: record for record in records if record.implementation in (BY_HAND, VIEWS)}
    for name in (OURS, OURS_VIEWS):
        same = [record for record in records if record.implementation == name]
        ratio, where = worst((by_hand[ours.case].median_ms / ours.median_ms, ours.case) for ours in same)
        yield Goal(f"{name} of a small batch, vs slices by hand, worst", 1 / 1.5, ratio, "x", where)


def main(arguments: argparse.Namespace) -> None:
    path, records = write(f"{CALLS}_{cpu_kind()}", run())
    print(f"{table(records)}\n\n{goals_table(goals(records))}\n\nwritten to {path}")
