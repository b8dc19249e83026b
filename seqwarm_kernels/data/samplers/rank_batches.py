"""Batches assigned to ranks: the same number for each rank, and no batch for two ranks."""

from __future__ import annotations

from collections import deque
from dataclasses import KW_ONLY, dataclass
from typing import Any

from .state import Position
from .windows import Window, WindowMaker

REMAINDERS = ("drop", "repeat", "empty")


@dataclass
class RankBatches:
    """Takes `world_size` batches for each step, across windows if needed, and returns one of them for this rank.

    Every rank makes the same plan. So ranks stay in step, only the end of an epoch has a remainder, and a position is
    valid for every rank and every number of ranks.
    """

    _maker: WindowMaker
    _next: Position  #: where the next window is formed
    _: KW_ONLY
    rank: int
    world_size: int
    remainder: str  #: one of `REMAINDERS`
    infinite: bool

    def __post_init__(self) -> None:
        self._windows: deque[Window] = deque()
        self._batches_served = 0  # of the first window
        self._available = 0  # batches of the windows that were not served
        self._ended = False

    @property
    def position(self) -> Position:
        return self._windows[0].position(self._batches_served) if self._windows else self._next

    def next_epoch(self) -> Position:
        """The start of the next epoch. What was not served of this one does not count.

        A last step with batches for only some ranks counts as a step.
        """
        position = self.position
        steps = -(-position.served.batches // self.world_size)
        served = position.served._replace(batches=steps * self.world_size)
        return self._maker.epoch_start(position.epoch + 1, served)

    def has_step(self) -> bool:
        """Whether the epoch has another step for this rank. Forms the windows of that step."""
        while self._available < self.world_size and not self._ended:
            window = self._maker.form(self._next)
            if window is not None or self._next.batches_of_window:
                self._add(window)
            elif self.infinite and not self._next.is_epoch_start:
                self._next = self._maker.epoch_start(self._next.epoch + 1, self._next.served)
            else:
                self._ended = True
        return self._available >= self.world_size or (self._available > 0 and self.remainder != "drop")

    def step(self) -> list[Any] | None:
        """This rank's batch of the next step, [] for an empty batch; None at the end of the epoch."""
        if not self.has_step():
            self._check_epoch_large_enough()
            self._next = self.next_epoch()
            self._windows.clear()
            self._available = 0
            return None
        batch: list[Any] = []
        if self.rank < self._available:
            batch = self._batch(self._batches_served + self.rank)
        elif self.remainder == "repeat":
            last = self._windows[-1]
            batch = last.batch((self.rank - self._available) % len(last))
        served = min(self.world_size, self._available)
        self._batches_served += served
        self._available -= served
        while self._windows and self._batches_served >= len(self._windows[0]):
            self._batches_served -= len(self._windows.popleft())
        return batch

    def _batch(self, index: int) -> list[Any]:
        """Batch `index`, counted from the start of the first window."""
        windows = iter(self._windows)
        while index >= len(window := next(windows)):
            index -= len(window)
        return window.batch(index)

    def _add(self, window: Window | None) -> None:
        """Add the window at `_next`, which may be a position in the middle of a window."""
        served = self._next.batches_of_window
        if served:
            if window is None or not 0 < served < len(window) or window.position(served).served != self._next.served:
                raise ValueError(
                    "state_dict must be of the same items and lengths: its open window is another one here"
                )
            self._batches_served = served
        assert window is not None
        self._windows.append(window)
        self._available += len(window) - served
        self._next = window.position(len(window))

    def _check_epoch_large_enough(self) -> None:
        if self._windows and self._windows[0].start.is_epoch_start and self._batches_served == 0:
            raise ValueError(
                f"remainder must be 'repeat' or 'empty' for epochs of {self._available} batches on "
                f"{self.world_size} ranks, got 'drop'"
            )
