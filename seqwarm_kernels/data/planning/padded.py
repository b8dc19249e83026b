"""Where to cut items, longest first, into padded batches."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .plan import IntArray

#: How many batches are cut anew, those of the shortest items: 16 of 25, two of 70 or more. There is less to gain the
#: more batches a window has, and planning stays as quick as sorting.
_MOST, _LEAST, _SHARED = 16, 2, 10_000
#: Places of each kind that are tried for a cut.
_PLACES = 128
_TOO_MUCH = np.int64(1) << 60


def greedy_cuts(widths: IntArray, max_tokens: int | None, batch_size: int | None) -> list[int]:
    """[0, ..., len(widths)]: batch b holds items cuts[b] to cuts[b + 1], as many as there is room for.

    No other cuts make fewer batches. This is the rule of Marian and infinibatch: budget // longest of the batch.

    Args:
        widths: (items,) int64, falling, each at least 1 and at most `max_tokens`.
        max_tokens: rows times the widest one, at most. None: any number.
        batch_size: rows at most. None: any number.
    """
    count = len(widths)
    if max_tokens is None:
        assert batch_size is not None
        return [*range(0, count, batch_size), count] if count else [0]
    most = count if batch_size is None else batch_size
    cuts, begin = [0], 0
    while begin < count:
        begin = min(begin + min(max_tokens // widths.item(begin), most), count)
        cuts.append(begin)
    return cuts


def least_padding(widths: IntArray, cuts: list[int], max_tokens: int, batch_size: int | None) -> list[int]:
    """As many cuts as `cuts`, which are greedy ones, with less padding.

    Greedy batches are full but for the last one. Its room is spent where it saves most: among short items, whose
    batches have the widest spread. A shortest path, from cut to cut. Few places come into question for a cut: it is a
    change of width, or else the batch behind it is full, as this could take more items of that width at no cost; and no
    cut lies behind the greedy one, nor before the one that fills all batches behind it.
    """
    anew = min(_MOST, max(_LEAST, _SHARED // len(cuts) ** 2))
    latest = cuts[-1 - anew :] if anew < len(cuts) else cuts
    if len(latest) < 3:
        return cuts
    runs = _runs(widths, latest[0], max_tokens, len(widths) if batch_size is None else batch_size)
    places = _places(runs, latest)
    best, came_from = np.zeros(1, dtype=np.int64), []
    for begins, ends in pairwise(places):
        rows = ends - begins[:, None]
        run = np.searchsorted(runs.begins, begins, side="right") - 1
        costs = best[:, None] + rows * runs.widths[run][:, None]
        costs[(rows <= 0) | (rows > runs.rows[run][:, None])] = _TOO_MUCH
        came_from.append(costs.argmin(axis=0))
        best = costs[came_from[-1], np.arange(len(ends))]
    at, path = 0, []
    for ends, previous in zip(reversed(places[1:]), reversed(came_from), strict=True):
        path.append(ends.item(at))
        at = previous.item(at)
    return [*cuts[: len(cuts) - len(path)], *reversed(path)]


class _Runs(NamedTuple):
    """Items of one width that follow on each other."""

    begins: IntArray
    ends: IntArray
    widths: IntArray
    rows: IntArray  #: of a batch that begins in the run, at most


def _runs(widths: IntArray, begin: int, max_tokens: int, most: int) -> _Runs:
    changes = np.flatnonzero(widths[begin + 1 :] != widths[begin:-1]) + (begin + 1)
    begins = np.concatenate([[begin], changes])
    width = widths[begins]
    return _Runs(begins, np.concatenate([changes, [len(widths)]]), width, np.minimum(max_tokens // width, most))


def _places(runs: _Runs, latest: list[int]) -> list[IntArray]:
    """For each cut, where it is tried, the greedy place last."""
    reach = runs.ends - 1 + runs.rows  # the furthest end of a batch that begins in the run
    places = [np.asarray(latest[-1:])]
    for last in reversed(latest[1:-1]):
        run = np.searchsorted(reach, places[-1])
        full = np.maximum(places[-1] - runs.rows[run], runs.begins[run])  # the batch behind begins here if it is full
        first, end = np.searchsorted(runs.begins, (full.min(), last)).tolist()
        changes = runs.begins[first:end]
        inside = full[(full > runs.begins[run]) & (full < last)]
        places.append(np.concatenate([_some(changes), _some(inside), [last]]))
    places.append(np.asarray(latest[:1]))
    return places[::-1]


def _some(places: IntArray) -> IntArray:
    return places[:: len(places) // _PLACES + 1]
