"""What a call of resize_batch on a packed batch costs on the CPU, beside the same by hand with known boundaries."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from seqwarm_kernels import resize_batch
from seqwarm_kernels.data import PackedCollator
from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.library import overload
from seqwarm_kernels.ops.resize_packed.schema import PackedKind, cut_sequences

from ..common.records import CpuRecord, cpu_kind, in_turns, save, table
from ..common.timing import Call
from .implementations import OURS
from .report import PACKED

#: sequences, tokens, length
SIZES = [(8, 1024, 64), (16, 4096, 128), (64, 32768, 256), (2048, 32768, 8)]
MODES = ("truncate", "reshape")  # the latter with remainder="pad", which loses nothing
SLICES, INDEX, OPERATOR = "slices + cat", "index of each token", "seqwarm::resize_packed"

PackedBatch = dict[str, Any]
SECONDS = 0.5  #: of measuring, for each record


def make_batch(sequences: int, tokens: int) -> PackedBatch:
    """int64 tensors of `tokens` tokens, in sequences of random lengths, as the packed collator returns them."""
    ends = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(0))[: sequences - 1].sort().values + 1
    bounds = [0, *ends.tolist(), tokens]
    batch: PackedBatch = PackedCollator()([torch.arange(start, end) for start, end in pairwise(bounds)])
    return batch


def by_slices(batch: PackedBatch, length: int, mode: str) -> PackedBatch:
    pieces = []
    for start, end in pairwise(batch["cu_seq_lens_q"].tolist()):
        starts = [start] if mode == "truncate" else range(start, end, length)
        pieces += [(start, first, min(first + length, end)) for first in starts]
    cut = {name: torch.cat([batch[name][:, a:b] for _, a, b in pieces], 1) for name in ("input_ids", "labels")}
    positions = torch.cat([batch["position_ids"][:, start : start + b - a] for start, a, b in pieces], 1)
    lengths = torch.tensor([0, *(b - a for _, a, b in pieces)])
    return {**cut, "position_ids": positions, **_boundaries(lengths.cumsum(0, dtype=torch.int32))}


def by_index(batch: PackedBatch, length: int, mode: str) -> PackedBatch:
    pieces, new_bounds = _cut(batch, length, mode)
    first, source, start, _, _ = pieces
    piece = torch.repeat_interleave(new_bounds.diff())
    slot = torch.arange(len(piece)) - first[piece]
    taken = source[piece] + slot
    cut = {name: batch[name][:, taken] for name in ("input_ids", "labels")}
    return {**cut, "position_ids": batch["position_ids"][:, start[piece] + slot], **_boundaries(new_bounds.int())}


def by_operator(batch: PackedBatch, length: int, mode: str) -> PackedBatch:
    pieces, new_bounds = _cut(batch, length, mode)
    names, kinds = ("input_ids", "labels", "position_ids"), [PackedKind.TOKEN, PackedKind.TOKEN, PackedKind.POSITION]
    operator = overload("resize_packed", backends.choose("resize_packed", "cpu", None))
    tensors = [batch[name][0] for name in names]
    results = operator(tensors, None, pieces, int(new_bounds[-1]), [*map(int, kinds)], [0, 0, 0], False)
    cut = {name: result[None] for name, result in zip(names, results, strict=True)}
    return {**cut, **_boundaries(new_bounds.int())}


def ours(batch: PackedBatch, length: int, mode: str) -> PackedBatch:
    resized: PackedBatch = resize_batch(batch, length, mode=mode, remainder="drop" if mode == "truncate" else "pad")
    return resized


def _cut(batch: PackedBatch, length: int, mode: str) -> tuple[Tensor, Tensor]:
    rule = "truncate" if mode == "truncate" else "reshape_pad"
    pieces, new_bounds = cut_sequences(batch["cu_seq_lens_q"].long().numpy(), length, rule)
    return pieces, torch.from_numpy(new_bounds)


def _boundaries(bounds: Tensor) -> PackedBatch:
    longest = int(bounds.diff().max())
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    return dict(zip(names, (bounds, bounds, longest, longest), strict=True))


_Cut = Callable[[PackedBatch, int, str], PackedBatch]
IMPLEMENTATIONS: dict[str, _Cut] = {SLICES: by_slices, INDEX: by_index, OPERATOR: by_operator, OURS: ours}


def run(seconds: float) -> Iterator[CpuRecord]:
    torch.set_num_threads(1)
    for sequences, tokens, length in SIZES:
        for mode in MODES:
            batch = make_batch(sequences, tokens)
            calls: dict[str, Call] = {
                name: functools.partial(cut, batch, length, mode) for name, cut in IMPLEMENTATIONS.items()
            }
            for call in calls.values():  # all must return the same batch
                torch.testing.assert_close(call(), calls[SLICES](), rtol=0, atol=0)
            case = f"{mode}, 3 x {tokens} int64 in {sequences} sequences to {length}"
            facts = {"sequences": sequences, "tokens": tokens, "length": length, "mode": mode}
            yield from in_turns("resize_packed", case, calls, 1, seconds, facts)


def main(arguments: argparse.Namespace) -> None:
    save(f"{PACKED}_{cpu_kind()}", run(SECONDS), table)
