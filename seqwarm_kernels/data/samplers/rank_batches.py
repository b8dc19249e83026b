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
        self._left: deque[tuple[Window, int]] = deque()  # batches of the windows that were formed
        self._ended = False

    @property
    def position(self) -> Position:
        if not self._left:
            return self._next
        window, index = self._left[0]
        return window.position(index)

    def next_epoch(self) -> Position:
        """The start of the next epoch. What was not yielded of this one does not count.

        A last step with batches for only some ranks counts as a step.
        """
        position = self.position
        steps = -(-position.yielded.batches // self.world_size)
        yielded = position.yielded._replace(batches=steps * self.world_size)
        return self._maker.epoch_start(position.epoch + 1, yielded)

    def has_step(self) -> bool:
        """Whether the epoch has another step for this rank. Forms the windows of that step."""
        while len(self._left) < self.world_size and not self._ended:
            window = self._maker.form(self._next)
            if window is not None or self._next.batches_of_window:
                self._add(window)
            elif self.infinite and not self._next.is_epoch_start:
                self._next = self._maker.epoch_start(self._next.epoch + 1, self._next.yielded)
            else:
                self._ended = True
        return len(self._left) >= (self.world_size if self.remainder == "drop" else 1)

    def step(self) -> list[Any] | None:
        """This rank's batch of the next step, [] for an empty batch; None at the end of the epoch."""
        if not self.has_step():
            if self._left and self.position.is_epoch_start:
                raise ValueError(
                    f"remainder must be 'repeat' or 'empty' for epochs of {len(self._left)} batches on "
                    f"{self.world_size} ranks, got 'drop'"
                )
            self._next = self.next_epoch()
            self._left.clear()
            return None
        last, _ = self._left[-1]
        step = [self._left.popleft() for _ in range(min(self.world_size, len(self._left)))]
        if self.rank < len(step):
            window, index = step[self.rank]
            return window.batch(index)
        return last.batch((self.rank - len(step)) % len(last)) if self.remainder == "repeat" else []

    def _add(self, window: Window | None) -> None:
        """Add the window at `_next`, which may be a position in the middle of a window."""
        yielded = self._next.batches_of_window
        if yielded and (
            window is None or not 0 < yielded < len(window) or window.position(yielded).yielded != self._next.yielded
        ):
            raise ValueError("state_dict must be of the same items and lengths: its open window is another one here")
        assert window is not None
        self._left.extend((window, index) for index in range(yielded, len(window)))
        self._next = window.position(len(window))
