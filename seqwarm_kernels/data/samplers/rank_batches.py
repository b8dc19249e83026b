"""Batches assigned to ranks: the same number for each rank, and no batch for two ranks."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from ..batch_planning.plan import Plan
from .schedule_progress import Counts
from .windows import Start, Window, WindowMaker

REMAINDERS = ("drop", "repeat", "empty")


class Position(NamedTuple):
    """A position of all ranks between two steps."""

    start: Start
    counts: Counts  #: served to all ranks
    num_items: int | None = None  #: of the open window; None: the window was not formed yet
    max_length: int | None = None  #: of the open window
    batches_served: int = 0  #: batches of the open window that were served to all ranks together


class RankBatches:
    """Takes `world_size` batches for each step, across windows if needed, and returns one of them for this rank.

    Every rank makes the same plan. So ranks stay in step, only the end of an epoch has a remainder, and a position is
    valid for every rank and every number of ranks.
    """

    def __init__(
        self, maker: WindowMaker, position: Position, *, rank: int, world_size: int, remainder: str, infinite: bool
    ) -> None:
        self._maker = maker
        self._rank = rank
        self._world_size = world_size
        self._remainder = remainder
        self._infinite = infinite
        self._windows: deque[Window] = deque()
        self._batches_served = 0  # of the first window
        self._next_start: Start = position.start
        self._ended = False
        self._not_restored: Position | None = position
        self._latest: tuple[Plan, int] | None = None  # of the batch of the last step; None: it was empty

    @property
    def position(self) -> Position:
        if self._not_restored is not None:
            return self._not_restored
        if not self._windows:
            return Position(self._next_start, self._next_start.counts)
        window = self._windows[0]
        counts = window.counts(self._batches_served)
        return Position(window.start, counts, window.num_items, window.max_length, self._batches_served)

    @property
    def longest(self) -> int:
        """Tokens of the longest piece in the batch of the last step."""
        if self._latest is None:
            return 0
        plan, index = self._latest
        return int(plan.batch(index)[2].max(initial=0))

    def next_epoch(self) -> Position:
        """The start of the next epoch. What was not served of this one does not count.

        A last step with batches for only some ranks counts as a step.
        """
        position = self.position
        steps = -(-position.counts.batches // self._world_size)
        counts = position.counts._replace(batches=steps * self._world_size)
        return Position(self._maker.epoch_start(position.start.epoch + 1, counts), counts)

    def has_step(self) -> bool:
        """Whether the epoch has another step for this rank."""
        available = self._form_windows_for_step()
        return available >= self._world_size or (available > 0 and self._remainder != "drop")

    def step(self) -> list[Any] | None:
        """This rank's batch of the next step, [] for an empty batch; None at the end of the epoch."""
        if not self.has_step():
            self._check_epoch_large_enough()
            self._next_start, self._batches_served = self.next_epoch().start, 0
            self._windows.clear()
            return None
        available = self._num_available()
        batch: list[Any] = []
        self._latest = None
        if self._rank < available:
            batch = self._batch(self._batches_served + self._rank)
        elif self._remainder == "repeat":
            last = self._windows[-1]
            batch = self._batch_of(last, (self._rank - available) % len(last))
        self._batches_served += min(self._world_size, available)
        while self._windows and self._batches_served >= len(self._windows[0]):
            self._batches_served -= len(self._windows.popleft())
        return batch

    def _batch(self, index: int) -> list[Any]:
        for window in self._windows:
            if index < len(window):
                return self._batch_of(window, index)
            index -= len(window)
        raise AssertionError(index)

    def _batch_of(self, window: Window, index: int) -> list[Any]:
        self._latest = window.plan, index
        return window.batch(index)

    def _num_available(self) -> int:
        return sum(map(len, self._windows)) - self._batches_served

    def _form_windows_for_step(self) -> int:
        """Form windows until they have enough batches for a step. Returns the number of available batches."""
        self._restore_open_window()
        while (available := self._num_available()) < self._world_size and not self._ended:
            window = self._maker.form(self._next_start)
            if window is not None:
                self._add(window)
            elif self._infinite and self._next_start.counts != self._next_start.epoch_start_counts:
                self._start_next_epoch()
            else:
                self._ended = True
        return available

    def _restore_open_window(self) -> None:
        """Form the window again that was open at the initial position."""
        position = self._not_restored
        if position is None:
            return
        if position.num_items is not None:
            window = self._maker.form_again(position.start, position.num_items, position.max_length)
            if window is None or position.batches_served >= len(window):
                raise ValueError("state_dict must be of the same items: its open window is different here")
            counts = window.counts(position.batches_served)
            if counts != position.counts:
                raise ValueError(
                    "state_dict must be of the same items and lengths: what was served of its open window is "
                    f"{position.counts} in the state, {counts} here"
                )
            self._add(window)
        self._not_restored, self._batches_served = None, position.batches_served

    def _add(self, window: Window) -> None:
        self._windows.append(window)
        self._next_start = window.next_start

    def _check_epoch_large_enough(self) -> None:
        is_first_step = self._windows and self._windows[0].start.counts == self._next_start.epoch_start_counts
        if is_first_step and self._batches_served == 0:
            raise ValueError(
                "remainder must be 'repeat' or 'empty' where an epoch does not suffice for all ranks, got 'drop' with "
                f"{self._num_available()} batches for {self._world_size} ranks"
            )

    def _start_next_epoch(self) -> None:
        self._next_start = self._maker.epoch_start(self._next_start.epoch + 1, self._next_start.counts)
