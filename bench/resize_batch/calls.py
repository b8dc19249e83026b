"""What a call on a small batch costs: resize_batch, a scheduler's resize and an attached model."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler, resize_batch

from ..common.records import CpuRecord, cpu_kind, in_turns, save, table
from ..common.timing import Call
from .implementations import BY_HAND, OURS, OURS_VIEWS, VIEWS, Batch, by_hand, views_of
from .report import CALLS

NAMES = ("input_ids", "labels", "attention_mask", "token_type_ids")
#: rows, tokens, length
SIZES = [(2, 128, 32), (8, 128, 64), (8, 1024, 256)]
SMALL = (3, 8, 128, 64)  #: tensors, rows, tokens, length of the batch that goes through all layers
GATHER = "gather from the first valid token on"
SCHEDULED, ATTACHED = "scheduler.resize", "call of an attached model"
_Case = tuple[str, dict[str, Call], dict[str, Any]]  # with the facts of the case
SECONDS = 0.5  #: of measuring, for each record


def make_batch(tensors: int, rows: int, tokens: int, side: str) -> Batch:
    """int64 tensors. With an attention mask, the rows are padded on one side."""
    batch = {name: torch.randint(1000, (rows, tokens)) for name in NAMES[:tensors]}
    if "attention_mask" in batch:
        valid = torch.randint(tokens // 2, tokens + 1, (rows, 1))
        valid[0] = tokens
        mask = (torch.arange(tokens) < valid).long()
        batch["attention_mask"] = mask if side == "right" else mask.flip(1)
    return batch


def _gathered(batch: Batch, length: int) -> Batch:
    mask = batch["attention_mask"]
    first = mask.argmax(1, keepdim=True).clamp(max=mask.shape[1] - length)
    positions = first + torch.arange(length)
    return {name: tensor.gather(1, positions) for name, tensor in batch.items()}


class Identity(nn.Module):
    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return batch


def run(seconds: float) -> Iterator[CpuRecord]:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the schedule is not stepped
        for case, calls, facts in (*_rows(), _layers()):
            yield from in_turns("resize_batch", case, calls, 1, seconds, facts)


def _rows() -> Iterator[_Case]:
    for tensors in range(1, len(NAMES) + 1):
        for rows, tokens, length in SIZES:
            size = f"{tensors} x {rows} x {tokens} int64 to {length}"
            for side in ("right", "left") if tensors >= 3 else ("right",):
                batch = make_batch(tensors, rows, tokens, side)
                facts = {"tensors": tensors, "rows": rows, "tokens": tokens, "length": length, "padded": side}
                calls: dict[str, Call] = {
                    BY_HAND: partial(by_hand, batch, length, "truncate"),  # keeps padding on the left
                    OURS: partial(resize_batch, batch, length),
                }
                if side == "left":
                    calls |= {GATHER: partial(_gathered, batch, length)}
                _check(calls[GATHER if side == "left" else BY_HAND], calls[OURS])
                yield f"copies, {size}, padded {side}", calls, facts
                if side == "right":  # a view cannot leave out padding on the left
                    views: dict[str, Call] = {
                        VIEWS: partial(views_of, batch, length, "truncate"),
                        OURS_VIEWS: partial(resize_batch, batch, length, copy=False),
                    }
                    _check(*views.values())
                    yield f"views, {size}, padded {side}", views, facts


def _layers() -> _Case:
    """One small batch through resize_batch, a scheduler, and a model with the scheduler attached."""
    tensors, rows, tokens, length = SMALL
    batch = make_batch(tensors, rows, tokens, "right")
    scheduler = SequenceLengthScheduler(length, tokens, duration=1000)
    model = Identity()
    scheduler.attach(model)
    calls: dict[str, Call] = {
        OURS: partial(resize_batch, batch, length),
        SCHEDULED: partial(scheduler.resize, batch),
        ATTACHED: partial(model, **batch),
    }
    _check(partial(by_hand, batch, length, "truncate"), *calls.values())
    facts = {"tensors": tensors, "rows": rows, "tokens": tokens, "length": length}
    return f"layers, {tensors} x {rows} x {tokens} int64 to {length}", calls, facts


def _check(expected: Call, *others: Call) -> None:
    for call in others:
        torch.testing.assert_close(call(), expected(), rtol=0, atol=0)


def main(arguments: argparse.Namespace) -> None:
    save(f"{CALLS}_{cpu_kind()}", run(SECONDS), table)
