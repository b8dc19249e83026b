"""Which items of an epoch were served, when shorter ones may come before longer ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..planning.plan import IntArray
from .readers import Chunk, Reader


class Front(NamedTuple):
    """Items up to `bound` tokens long, and longer than the bound of the front before, were served up to `place`.

    Fronts stand in the order of their bounds. Shorter items are served first, so places fall.
    """

    bound: int
    place: Any


def left(fronts: Sequence[Front], reader: Reader, chunk: Chunk, reach: int) -> NDArray[np.bool_]:
    """(items,) bool: those of the chunk that were not served yet and have at most `reach` tokens."""
    bounds = [front.bound for front in fronts]
    served = np.asarray([reader.position(front.place) for front in fronts])
    positions = np.arange(chunk.position, chunk.position + len(chunk.lengths))
    lengths = np.minimum(chunk.lengths, bounds[-1])
    return (lengths <= reach) & (positions >= served[np.searchsorted(bounds, lengths)])


def earliest(fronts: Sequence[Front], reach: int) -> Any:
    """The place from which on there may be items of at most `reach` tokens that were not served."""
    return next((front.place for front in fronts if reach <= front.bound), fronts[-1].place)


def advanced(fronts: Sequence[Front], reader: Reader, reach: int, place: Any) -> tuple[Front, ...]:
    """The fronts once all items of at most `reach` tokens were served up to `place`."""
    result: list[Front] = []
    shorter = 0
    for bound, before in fronts:
        further = place if reader.position(before) < reader.position(place) else before
        if bound <= reach:
            result.append(Front(bound, further))
        else:
            if shorter < reach:
                result.append(Front(reach, further))
            result.append(Front(bound, before))
        shorter = bound
    return tuple(
        front
        for index, front in enumerate(result)
        if index + 1 == len(result) or reader.position(front.place) != reader.position(result[index + 1].place)
    )


def shortest_left(fronts: Sequence[Front], reader: Reader, epoch: int, count: int | None) -> IntArray:
    """Tokens of the shortest item that was not served, up to the last bound: (1,) int64, (0,) if nothing is left.

    Args:
        count: items that are read at a time; None: all.
    """
    shortest: IntArray = np.zeros(0, dtype=np.int64)
    place = fronts[-1].place
    while len((chunk := reader.read(epoch, place, count)).lengths):
        lengths = np.minimum(chunk.lengths, fronts[-1].bound)[left(fronts, reader, chunk, fronts[-1].bound)]
        shortest = np.sort(np.append(shortest, lengths))[:1]
        place = chunk.place(chunk.position + len(chunk.lengths))
    return shortest
