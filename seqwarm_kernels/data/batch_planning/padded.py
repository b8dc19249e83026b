"""Boundaries between padded batches of sorted items."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .plan import IntArray

#: Number of batches whose boundaries are moved, those of the shortest items: 16 of 24 batches, 2 of 57 or more.
#: The more batches a window has, the less there is to gain. So planning stays as fast as sorting.
_MAX_MOVED, _MIN_MOVED, _MOVED_SCALE = 16, 2, 10_000
#: Candidates of each kind that are tried for one boundary.
_MAX_CANDIDATES = 128
_INFEASIBLE = np.int64(1) << 60


def greedy_boundaries(widths: IntArray, max_tokens: int | None, batch_size: int | None) -> list[int]:
    """[0, ..., len(widths)]: batch b holds items boundaries[b] to boundaries[b + 1], as many as fit.

    No other boundaries give fewer batches. This is the rule of Marian and infinibatch: budget // longest of the batch.

    Args:
        widths: (items,) int64, decreasing, each at least 1 and at most `max_tokens`.
        max_tokens: maximum of rows times the largest width; None: unlimited.
        batch_size: maximum number of rows; None: unlimited.
    """
    count = len(widths)
    max_rows = count if batch_size is None else batch_size
    boundaries, begin = [0], 0
    while begin < count:
        rows = max_rows if max_tokens is None else min(max_tokens // widths.item(begin), max_rows)
        begin = min(begin + rows, count)
        boundaries.append(begin)
    return boundaries


def reduce_padding(widths: IntArray, greedy: list[int], max_tokens: int, batch_size: int | None) -> list[int]:
    """The same number of boundaries as the `greedy` ones, with less padding.

    Greedy batches are full except the last. The room of the last batch is spent where it saves most: among short
    items, whose batches have the widest spread. The solution is a shortest path from boundary to boundary.

    Each boundary has few candidates. It is a change of width, or the next batch is full: otherwise the next batch could
    take more items of that width at no cost. It is never after the greedy boundary, and never before the boundary that
    fills all later batches.
    """
    moved = min(_MAX_MOVED, max(_MIN_MOVED, _MOVED_SCALE // len(greedy) ** 2))
    latest = greedy[-1 - moved :]
    if len(latest) < 3:
        return greedy
    runs = _runs(widths, latest[0], max_tokens, len(widths) if batch_size is None else batch_size)
    candidates = _candidates(runs, latest)
    costs, choices = np.zeros(1, dtype=np.int64), []
    for begins, ends in pairwise(candidates):
        rows = ends - begins[:, None]
        run = np.searchsorted(runs.begins, begins, side="right") - 1
        totals = costs[:, None] + rows * runs.widths[run][:, None]
        totals[(rows <= 0) | (rows > runs.max_rows[run][:, None])] = _INFEASIBLE
        choices.append(totals.argmin(axis=0))
        costs = totals[choices[-1], np.arange(len(ends))]
    index, path = 0, []
    for ends, previous in zip(reversed(candidates[1:]), reversed(choices), strict=True):
        path.append(ends.item(index))
        index = previous.item(index)
    return [*greedy[: len(greedy) - len(path)], *reversed(path)]


class _Runs(NamedTuple):
    """Runs of consecutive items of equal width."""

    begins: IntArray
    ends: IntArray
    widths: IntArray
    max_rows: IntArray  #: maximum number of rows of a batch that begins in the run


def _runs(widths: IntArray, begin: int, max_tokens: int, max_rows: int) -> _Runs:
    changes = np.flatnonzero(widths[begin + 1 :] != widths[begin:-1]) + (begin + 1)
    begins = np.concatenate([[begin], changes])
    width = widths[begins]
    return _Runs(begins, np.concatenate([changes, [len(widths)]]), width, np.minimum(max_tokens // width, max_rows))


def _candidates(runs: _Runs, latest: list[int]) -> list[IntArray]:
    """For each boundary, the candidates that are tried; the greedy one is last."""
    furthest = runs.ends - 1 + runs.max_rows  # the furthest end of a batch that begins in the run
    candidates = [np.asarray(latest[-1:])]
    for greedy in reversed(latest[1:-1]):
        run = np.searchsorted(furthest, candidates[-1])
        full = np.maximum(candidates[-1] - runs.max_rows[run], runs.begins[run])  # the next batch begins here if full
        first, end = np.searchsorted(runs.begins, (full.min(), greedy)).tolist()
        changes = runs.begins[first:end]
        inside = full[(full > runs.begins[run]) & (full < greedy)]
        candidates.append(np.concatenate([_thinned(changes), _thinned(inside), [greedy]]))
    candidates.append(np.asarray(latest[:1]))
    return candidates[::-1]


def _thinned(candidates: IntArray) -> IntArray:
    return candidates[:: len(candidates) // _MAX_CANDIDATES + 1]
