"""Batches dealt out to ranks: the same number for each, none for two."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from .schedule_progress import Counts
from .windows import Start, Window, WindowMaker

REMAINDERS = ("drop", "repeat", "empty")


class Position(NamedTuple):
    """Where all ranks stand between two steps."""

    start: Start
    num_items: int | None = None  #: of the open window; None: it was not formed yet
    max_length: int | None = None
    served: int = 0  #: batches of the open window, of all ranks together


class Deal:
    """Takes `world_size` batches for each step, whatever windows they lie in, and gives one to this rank.

    Every rank makes the same plan. So ranks stay in step, with a remainder at the end of an epoch only, and a position
    is the same for all of them, and for any number of them.
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
        self._served = 0
        self._next: Start = position.start
        self._ended = False
        self._unopened: Position | None = position

    @property
    def position(self) -> Position:
        if self._unopened is not None:
            return self._unopened
        if not self._windows:
            return Position(self._next)
        window = self._windows[0]
        return Position(window.start, window.num_items, window.max_length, self._served)

    @property
    def counts(self) -> Counts:
        """What was handed out."""
        self._open()
        return self._windows[0].counts(self._served) if self._windows else self._next.counts

    def _open(self) -> None:
        """Form the window that was open when the position was taken."""
        if self._unopened is None:
            return
        start, num_items, max_length, served = self._unopened
        if num_items is not None:
            window = self._maker.form(start, num_items, max_length)
            if window is None or served >= len(window):
                raise ValueError("state_dict must be of the same items: its open window is another one here")
            self._add(window)
        self._unopened, self._served = None, served

    def has_step(self) -> bool:
        """Whether anything is left of the epoch that comes to this rank."""
        self._open()
        available = self._form_a_step()
        return available >= self._world_size or (available > 0 and self._remainder != "drop")

    def step(self) -> list[Any] | None:
        """This rank's batch of the next step, [] for an empty one; None at the end of the epoch."""
        if not self.has_step():
            self._check_not_in_vain()
            self._end_epoch()
            return None
        available = sum(map(len, self._windows)) - self._served
        batch: list[Any] = []
        if self._rank < available:
            batch = self._batch(self._served + self._rank)
        elif self._remainder == "repeat":
            last = self._windows[-1]
            batch = last.batch((self._rank - available) % len(last))
        self._served += min(self._world_size, available)
        while self._windows and self._served >= len(self._windows[0]):
            self._served -= len(self._windows.popleft())
        return batch

    def _batch(self, index: int) -> list[Any]:
        for window in self._windows:
            if index < len(window):
                return window.batch(index)
            index -= len(window)
        raise AssertionError(index)

    def _form_a_step(self) -> int:
        """Form windows until they suffice for a step; how many batches there are."""
        available = sum(map(len, self._windows)) - self._served
        while available < self._world_size and not self._ended:
            window = self._maker.form(self._next)
            if window is None:
                is_empty = self._next.counts == self._next.before
                self._ended = not self._infinite or is_empty
                if not self._ended:
                    self._next = self._maker.first(self._next.epoch + 1, self._next.counts)
                continue
            self._add(window)
            available += len(window)
        return available

    def _add(self, window: Window) -> None:
        self._windows.append(window)
        self._next = window.after

    def _check_not_in_vain(self) -> None:
        if not self._windows or self._windows[0].start.counts != self._next.before or self._served:
            return
        raise ValueError(
            f"remainder must be 'repeat' or 'empty' where an epoch does not suffice for all ranks, got 'drop' with "
            f"{sum(map(len, self._windows))} batches for {self._world_size} ranks"
        )

    def _end_epoch(self) -> None:
        """What is left goes, so that the position is the start of the next epoch.

        It was not handed out, and does not count; a last step that not all ranks had a batch for is one, too.
        """
        counts = self.counts
        steps = -(-counts.batches // self._world_size)
        self._next = self._next._replace(counts=counts._replace(batches=steps * self._world_size))
        self._windows.clear()
        self._served = 0
        self._next = self._maker.first(self._next.epoch + 1, self._next.counts)
