"""What a call on a small batch costs: resize_batch, packed batches, a scheduler's resize and an attached model."""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler, resize_batch

from ..common.goals import Goal, goals_table, worst
from ..common.records import CpuRecord, cpu_kind, table, write
from ..common.timing import Call, measure_single_calls
from .implementations import BY_HAND, OURS, OURS_VIEWS, VIEWS, Batch
from .packed import OPERATOR, by_operator, ours
from .packed import make_batch as make_packed_batch
from .report import CALLS

NAMES = ("input_ids", "labels", "attention_mask", "token_type_ids")
#: rows, tokens, length
SIZES = [(2, 128, 32), (8, 128, 64), (8, 1024, 256)]
ROUNDS = 10_000
SMALL = (3, 8, 128, 64)  #: tensors, rows, tokens, length of the batch that the goals are about
PACKED_SIZES = [(8, 1024, 64), (16, 4096, 128)]  #: sequences, tokens, length
GATHER = "gather from the first valid token on"
SCHEDULED, ATTACHED = "scheduler.resize", "call of an attached model"


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


class Identity(nn.Module):
    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return batch


def run(rounds: int = ROUNDS) -> Iterator[CpuRecord]:
    torch.set_num_threads(1)
    yield from _rows(rounds)
    yield from _packed(rounds // 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the schedule is not stepped
        yield from _layers(rounds)


def _rows(rounds: int) -> Iterator[CpuRecord]:
    for tensors in range(1, len(NAMES) + 1):
        for rows, tokens, length in SIZES:
            for side, made, cuts in cases(tensors):
                batch = make_batch(tensors, rows, tokens, side)
                _check(batch, length, cuts, side)
                calls: dict[str, Call] = {name: functools.partial(cut, batch, length) for name, cut in cuts.items()}
                case = f"{made}, {tensors} x {rows} x {tokens} int64 to {length}, padded {side}"
                facts = {"tensors": tensors, "rows": rows, "tokens": tokens, "length": length, "padded": side}
                yield from _records(case, calls, facts, rounds)


def _packed(rounds: int) -> Iterator[CpuRecord]:
    """Packed batches beside their operator, which includes the cut of sequences into pieces."""
    for sequences, tokens, length in PACKED_SIZES:
        batch = make_packed_batch(sequences, tokens)
        calls: dict[str, Call] = {
            name: functools.partial(cut, batch, length, "truncate")
            for name, cut in ((OPERATOR, by_operator), (OURS, ours))
        }
        case = f"packed, 3 x {tokens} int64 in {sequences} sequences to {length}"
        yield from _records(case, calls, {"sequences": sequences, "tokens": tokens, "length": length}, rounds)


def _layers(rounds: int) -> Iterator[CpuRecord]:
    """One small batch through resize_batch, a scheduler, and a model with the scheduler attached."""
    tensors, rows, tokens, length = SMALL
    batch = make_batch(tensors, rows, tokens, "right")
    scheduler = SequenceLengthScheduler(length, tokens, duration=1000)
    model = Identity()
    scheduler.attach(model)
    calls: dict[str, Call] = {
        OURS: functools.partial(resize_batch, batch, length),
        SCHEDULED: functools.partial(scheduler.resize, batch),
        ATTACHED: functools.partial(model, **batch),
    }
    for call in calls.values():
        torch.testing.assert_close(call(), _copies(batch, length), rtol=0, atol=0)
    facts = {"tensors": tensors, "rows": rows, "tokens": tokens, "length": length}
    yield from _records(f"layers, {tensors} x {rows} x {tokens} int64 to {length}", calls, facts, rounds)


def _records(case: str, calls: Mapping[str, Call], facts: dict[str, Any], rounds: int) -> Iterator[CpuRecord]:
    for name, timing in measure_single_calls(calls, rounds).items():
        yield CpuRecord("resize_batch", case, name, 1, timing.median, timing.iqr, None, facts)


def _check(batch: Batch, length: int, cuts: Mapping[str, _Cut], side: str) -> None:
    """All must return the same tensors, apart from slices of rows that are padded on the left."""
    results = [cut(batch, length) for name, cut in cuts.items() if side == "right" or name != BY_HAND]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def goals(records: list[CpuRecord]) -> Iterator[Goal]:
    times = {(record.case, record.implementation): record.median_ms for record in records}
    small = "{} x {} x {} int64 to {}".format(*SMALL)
    copies = f"copies, {small}, padded right"
    yield _ratio(f"{OURS} vs {BY_HAND}", times, [copies], OURS, BY_HAND, 2)
    packed = [case for case, name in times if name == OPERATOR]
    yield _ratio(f"{OURS} of a packed batch vs {OPERATOR}, worst", times, packed, OURS, OPERATOR, 1.5)
    for name, below, most in ((SCHEDULED, OURS, 5), (ATTACHED, SCHEDULED, 15)):
        own, other = (times.get((f"layers, {small}", each)) for each in (name, below))
        value = None if own is None or other is None else (own - other) * 1e3
        yield Goal(f"{name} beyond {below}", most, value, "µs", small, at_most=True)


def _ratio(
    what: str, times: Mapping[tuple[str, str], float], cases: list[str], ours: str, other: str, most: float
) -> Goal:
    ratios = [(-times[case, ours] / times[case, other], case) for case in cases if (case, ours) in times]
    ratio, where = worst(ratios)
    return Goal(what, most, ratio and -ratio, "x", where, at_most=True)


def main(arguments: argparse.Namespace) -> None:
    path, records = write(f"{CALLS}_{cpu_kind()}", run())
    print(f"{table(records)}\n\n{goals_table(goals(records))}\n\nwritten to {path}")
