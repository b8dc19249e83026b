"""Barriers, tiles in shared memory, and what happened before what.

A clock counts the steps that a partition knows to have happened: its own, and those that arrivals passed on to its
waits. An access must know the accesses that it depends on: that one schedule ran them in order is not enough.
"""

import linecache
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: By actor (a partition, its products, its copies into global memory, or a copy into a tile), the number of its steps
#: that are known to have happened.
Clock = dict[Any, int]

#: A global variable of emulated functions, which tells their frames from the emulator's.
EMULATED = "__emulated_on_cpu_threads__"


class ProtocolError(Exception):
    """A kernel does what a GPU may answer with wrong results, a fault, or no end."""


def here() -> str:
    """The lines of kernels that called the emulator, and those that called them."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1)) if EMULATED in frame.f_globals]
    return ", in ".join(
        f"{frame.f_code.co_name}, line {frame.f_lineno}: "
        f"{linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()}"
        for frame in frames
    )


def learn(clock: Clock, other: Clock) -> None:
    """Add what another clock knows."""
    clock.update({actor: step for actor, step in other.items() if clock.get(actor, 0) < step})


class Barrier:
    """One of the barriers of an allocation."""

    def __init__(self, place: int) -> None:
        self.name = f"barrier {place} of {here()}"
        self.count = self.phase = self.pending = self.bytes = 0
        self.arriving: Clock = {}  # what arrivals of the phase bring
        self.clock: Clock = {}  # what waits learn

    def __str__(self) -> str:
        missing = f"{self.pending} of {self.count} arrivals and {self.bytes} bytes missing"
        return f"{self.name} (in phase {self.phase}, {missing})"

    def check(self, where: str) -> None:
        if self.count == 0:
            raise ProtocolError(f"{where}: {self.name} is used before its init")

    def change(self, clock: Clock, where: str, arrivals: int = 0, num_bytes: int = 0) -> None:
        self.check(where)
        self.pending -= arrivals
        self.bytes += num_bytes
        learn(self.arriving, clock)
        if self.pending < 0:
            raise ProtocolError(f"{where}: more arrivals than expected at {self}")
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count
            learn(self.clock, self.arriving)
            self.arriving = {}


@dataclass(eq=False)
class Copy:
    """A copy in flight from global memory into a tile."""

    where: str
    clock: Clock
    barrier: Barrier
    num_bytes: int
    land: Callable[[], None]

    def __post_init__(self) -> None:
        self.clock[self] = 1

    def __str__(self) -> str:
        return f"a copy ({self.where})"


@dataclass(eq=False)
class Queue:
    """A partition's products, or its copies into global memory. They end in order, and read tiles until a wait."""

    name: str
    started: int = 0

    def __str__(self) -> str:
        return self.name


@dataclass
class Slot:
    """A place in shared memory, and the last accesses to it: an actor and its step.

    Raises where an access is not known to follow those that it must follow, in this schedule or another.
    """

    written: tuple[Any, int] | None = None
    reads: Clock = field(default_factory=dict)
    fenced: bool = True  # whether products and copies see what was written

    def _check_written(self, clock: Clock, access: str) -> None:
        if self.written is not None and clock.get(self.written[0], 0) < self.written[1]:
            raise ProtocolError(f"{access} touches a tile without a wait for its write by {self.written[0]}")

    def read(self, clock: Clock, actor: Any, step: int, access: str) -> None:
        self._check_written(clock, access)
        if self.written is None:
            raise ProtocolError(f"{access} touches a tile that nobody has written")
        if isinstance(actor, Queue) and not self.fenced:
            raise ProtocolError(f"{access} touches a tile without a fence after its write")
        self.reads[actor] = step

    def write(self, clock: Clock, actor: Any, step: int, access: str) -> None:
        self._check_written(clock, access)
        for reader, last in self.reads.items():
            if clock.get(reader, 0) < last:
                raise ProtocolError(f"{access} touches a tile that {reader} may still read")
        self.written, self.reads, self.fenced = (actor, step), {}, isinstance(actor, Copy)


def poison(values: np.ndarray) -> None:
    values[...] = np.nan if values.dtype.kind == "f" else np.iinfo(values.dtype).max // 2
