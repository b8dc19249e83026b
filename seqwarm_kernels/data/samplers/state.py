"""How a state is kept: where all ranks are between two steps, as a `Position` and as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..batch_planning.plan import IntArray

#: Where a reader continues in an epoch: "position", the number of items before it, and what else the reader needs.
Cursor: TypeAlias = dict[str, Any]


class Counts(NamedTuple):
    """Numbers for all ranks together since the beginning of training."""

    items: int = 0
    tokens: int = 0  #: without padding
    batches: int = 0


class Position(NamedTuple):
    """Where all ranks are between two steps: enough to form the open window again, and every later one."""

    epoch: int
    #: The cursor up to which items were yielded before the open window. Under warmup by bucket, short items are yielded
    #: first: an entry (bound, cursor) is that of items of at most `bound` tokens, and more than the previous bound.
    #: Bounds increase, so cursors move back from one bound to the next.
    yielded_up_to: tuple[tuple[int, Cursor], ...]
    yielded: Counts
    window_start: Counts  #: yielded before the open window
    epoch_start: Counts  #: yielded before the epoch
    min_length: int = 0  #: the current length is at least this, because no shorter item was left in the epoch

    @property
    def batches_of_window(self) -> int:
        """Number of batches of the open window that were yielded."""
        return self.yielded.batches - self.window_start.batches

    @property
    def is_epoch_start(self) -> bool:
        return self.yielded == self.epoch_start

    def first_left(self, max_length: int) -> Cursor:
        """The cursor of the first item of at most `max_length` tokens that may still be left."""
        cursors = (cursor for bound, cursor in self.yielded_up_to if max_length <= bound)
        return next(cursors, self.yielded_up_to[-1][1])

    def is_left(self, lengths: IntArray, positions: IntArray, max_length: int) -> NDArray[np.bool_]:
        """(items,) bool: the items of at most `max_length` tokens that are left."""
        bounds = [bound for bound, _ in self.yielded_up_to]
        first_positions = np.asarray([cursor["position"] for _, cursor in self.yielded_up_to])
        lengths = np.minimum(lengths, bounds[-1])
        return (lengths <= max_length) & (positions >= first_positions[np.searchsorted(bounds, lengths)])

    def marked_yielded(self, max_length: int, cursor: Cursor) -> tuple[tuple[int, Cursor], ...]:
        """`yielded_up_to` once all items of at most `max_length` tokens are yielded up to `cursor`."""
        marked: dict[int, tuple[int, Cursor]] = {}
        for bound in sorted({max_length, *(bound for bound, _ in self.yielded_up_to)}):
            before = self.first_left(bound)
            after = max(before, cursor, key=itemgetter("position")) if bound <= max_length else before
            marked[after["position"]] = bound, after  # an entry with the same position is redundant
        return tuple(marked.values())

    def plain(self) -> dict[str, Any]:
        """The same as JSON-able values, without the contents of items."""
        counts = {name: getattr(self, name)._asdict() for name in ("yielded", "window_start", "epoch_start")}
        return {**self._asdict(), **counts, "yielded_up_to": [list(entry) for entry in self.yielded_up_to]}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Position:
        """The position of the values of `plain`."""
        return cls(
            epoch=state["epoch"],
            yielded_up_to=tuple((bound, dict(cursor)) for bound, cursor in state["yielded_up_to"]),
            yielded=Counts(**state["yielded"]),
            window_start=Counts(**state["window_start"]),
            epoch_start=Counts(**state["epoch_start"]),
            min_length=state["min_length"],
        )


def batch_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the `LengthBatchSampler` or `LengthBatchStream` inside a loader's state.

    torchdata's StatefulDataLoader loads its own states with the same number of workers only. The state inside does
    not depend on that number: call `sampler.load_state_dict(batch_state(state))` and make a new loader.

    Raises:
        ValueError: `state_dict` has no state of batches, or the loader took that state some batches earlier: its
            `snapshot_every_n_steps` must be 1.
    """
    found = _find(state_dict)
    if found is None:
        raise ValueError(f"state_dict must hold a state of batches, got {list(state_dict)}")
    return found


def _find(state: Any) -> dict[str, Any] | None:
    if not isinstance(state, Mapping):
        return None
    if "yielded_up_to" in state:
        return dict(state)
    found = next(filter(None, map(_find, state.values())), None)
    # The names of two classes of torchdata for the batches since the state was taken.
    steps = state.get("steps_since_snapshot", 0) + state.get("_steps_since_snapshot", 0)
    if found is not None and steps:
        raise ValueError(f"state_dict must be that of the last batch, got one of {steps} batches before it")
    return found
