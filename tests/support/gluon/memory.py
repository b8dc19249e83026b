"""Shared memory, barriers, and what happened before what.

A clock counts the steps that a partition knows to have happened: its own, and those that arrivals passed on to its
waits. An access must know the accesses that it depends on: that one schedule ran them in order is not enough.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .sites import here

#: By actor (a partition or a copy), the number of its steps that are known to have happened.
Clock = dict[Any, int]


class ProtocolError(Exception):
    """A kernel does what a GPU may answer with wrong results, a fault, or no end."""


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


class Flight:
    """A product, or a copy into global memory, that may read its tiles until it is waited for."""

    def __init__(self, where: str) -> None:
        self.where, self.finished = where, False
        self.regions: list[Region] = []


class Copy:
    """A copy in flight from global memory into a tile."""

    def __init__(self, where: str, clock: Clock, barrier: Barrier, num_bytes: int, land: Callable[[], None]) -> None:
        self.where, self.clock, self.barrier, self.num_bytes, self.land = where, clock, barrier, num_bytes, land
        clock[self] = 1

    def __str__(self) -> str:
        return f"a copy ({self.where})"


@dataclass
class Region:
    """Bytes of shared memory, and the last accesses to them: an actor and its step."""

    begin: int
    end: int
    write: tuple[Any, int] | None = None
    reads: Clock = field(default_factory=dict)
    readers: list[Flight] = field(default_factory=list)
    fenced: bool = True  # whether products and copies see the write


class SharedMemory:
    """Raises where an access is not known to follow those that it must follow, in this schedule or another."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.allocated: list[np.ndarray] = []  # kept, so that no two tiles have one address

    def allocate(self, shape: list[int], dtype: np.dtype) -> np.ndarray:
        self.allocated.append(np.empty(shape, dtype))
        poison(self.allocated[-1])
        return self.allocated[-1]

    def _touched(self, tile: np.ndarray, clock: Clock, access: str) -> Iterator[Region]:
        """Regions that share bytes with a tile."""
        begin, end = bounds(tile)
        for region in self.regions:
            if region.begin < end and begin < region.end:
                if region.write is not None and not _knows(clock, *region.write):
                    raise ProtocolError(f"{access} touches a tile without a wait for its write by {region.write[0]}")
                yield region

    def read(self, tile: np.ndarray, reader: Any, clock: Clock, access: str, flight: Flight | None = None) -> None:
        """Note a read that ends now or with a flight."""
        touched = list(self._touched(tile, clock, access))
        if all(region.write is None for region in touched):
            raise ProtocolError(f"{access} touches a tile that nobody has written")
        if flight is not None and not all(region.fenced for region in touched):
            raise ProtocolError(f"{access} touches a tile without a fence after its write")
        region = next((each for each in touched if (each.begin, each.end) == bounds(tile)), None)
        if region is None:
            region = Region(*bounds(tile))
            self.regions.append(region)
        if flight is None:
            region.reads[reader] = clock[reader]
        else:
            region.readers.append(flight)
            flight.regions.append(region)

    def write(self, tile: np.ndarray, writer: Any, clock: Clock, access: str) -> Region:
        begin, end = bounds(tile)
        for region in list(self._touched(tile, clock, access)):
            if region.readers:
                raise ProtocolError(f"{access} touches a tile that is still read: {region.readers[0].where}")
            for actor, step in region.reads.items():
                if not _knows(clock, actor, step):
                    raise ProtocolError(f"{access} touches a tile that {actor} may still read")
            if begin <= region.begin and region.end <= end:
                self.regions.remove(region)
        region = Region(begin, end, write=(writer, clock[writer]))
        self.regions.append(region)
        return region


def _knows(clock: Clock, actor: Any, step: int) -> bool:
    return clock.get(actor, 0) >= step


def bounds(tile: np.ndarray) -> tuple[int, int]:
    """Addresses of a view's first byte and behind its last. Its strides are positive."""
    begin = tile.__array_interface__["data"][0]
    span = sum((size - 1) * stride for size, stride in zip(tile.shape, tile.strides, strict=True))
    return begin, begin + span + tile.itemsize


def poison(values: np.ndarray) -> None:
    values[...] = math.nan if values.dtype.kind == "f" else np.iinfo(values.dtype).max // 2
