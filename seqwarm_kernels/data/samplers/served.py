"""Which items of an epoch were served, where short items are served before long ones: `Position.served_up_to`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .readers import Items
from .state import Cursor


def first_unserved(served_up_to: tuple[tuple[int, Cursor], ...], max_length: int) -> Cursor:
    """The cursor of the first item of at most `max_length` tokens that may be unserved.

    Bounds increase. Short items are served first, so cursors move back from one bound to the next.
    """
    return next((cursor for bound, cursor in served_up_to if max_length <= bound), served_up_to[-1][1])


def is_unserved(served_up_to: tuple[tuple[int, Cursor], ...], read: Items, max_length: int) -> NDArray[np.bool_]:
    """(items,) bool: the unserved items of at most `max_length` tokens."""
    bounds = [bound for bound, _ in served_up_to]
    first_positions = np.asarray([cursor["position"] for _, cursor in served_up_to])
    lengths = np.minimum(read.lengths, bounds[-1])
    return (lengths <= max_length) & (read.positions >= first_positions[np.searchsorted(bounds, lengths)])


def marked_served(
    served_up_to: tuple[tuple[int, Cursor], ...], max_length: int, cursor: Cursor
) -> tuple[tuple[int, Cursor], ...]:
    """`served_up_to` once all items of at most `max_length` tokens are served up to `cursor`."""
    marked: list[tuple[int, Cursor]] = []
    previous_bound = 0
    for bound, before in served_up_to:
        after = cursor if before["position"] < cursor["position"] else before
        if bound <= max_length:
            marked.append((bound, after))
        else:
            if previous_bound < max_length:
                marked.append((max_length, after))
            marked.append((bound, before))
        previous_bound = bound
    # An entry is redundant if the next one has the same position.
    nexts = [entry[1]["position"] for entry in marked[1:]]
    return tuple(entry for entry, after in zip(marked, [*nexts, None], strict=True) if entry[1]["position"] != after)
