"""Allocations of real training steps, recorded at a few lengths and played at any length on `CachingAllocator`.

Storages of operators' results count. What an operator allocates and frees inside is not seen.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.allocator.replay import Block, CachingAllocator

STEPS = 3  #: without optimizer state, with state, and with what a step with state leaves behind


class Event(NamedTuple):
    """The allocation or release of a storage."""

    age: int  #: steps since its allocation
    number: int  #: among the allocations of that step
    size: int  #: bytes; 0 at its release


class Recording(TorchDispatchMode):
    """Records the events of steps while active."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[Event]] = []
        self._allocated = 0  # in the current step
        self._living: dict[int, weakref.ref[Any]] = {}

    def boundaries(self) -> Iterator[None]:
        """Yield at the start of each step."""
        for _ in range(STEPS):
            self.steps.append([])
            self._allocated = 0
            yield
        self.steps.append([])  # what the end of a loop frees

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._living and self.steps:
                self._record(leaf.untyped_storage())
        return result

    def _record(self, storage: Any) -> None:
        key, step, number = storage._cdata, len(self.steps), self._allocated
        if storage.nbytes():
            self._allocated += 1
            self.steps[-1].append(Event(0, number, storage.nbytes()))
            self._living[key] = weakref.ref(storage, lambda _: self._freed(key, step, number))

    def _freed(self, key: int, step: int, number: int) -> None:
        del self._living[key]
        self.steps[-1].append(Event(len(self.steps) - step, number, 0))


class Steps:
    """The events of steps at any length. Sizes are polynomials of the length, of degree two at most.

    Args:
        record: Returns the recorded steps at a length.
        lengths: Four lengths. Three determine the sizes, and the fourth checks them.

    Raises:
        ValueError: The steps at these lengths differ in more than sizes, or a size does not follow a polynomial.
    """

    def __init__(self, record: Callable[[int], list[list[Event]]], lengths: Sequence[int]) -> None:
        recorded = {length: record(length) for length in lengths}
        *fitted, _ = lengths
        self.events = recorded[fitted[0]]
        self._coefficients = [
            numpy.linalg.solve(numpy.vander(fitted, 3), [[event.size for event in step] for step in steps])
            for steps in zip(*(recorded[length] for length in fitted), strict=True)
        ]
        self.at = functools.cache(self._at)
        for length, steps in recorded.items():
            for number, step in enumerate(steps):
                if self.at(length, number) != step:
                    raise ValueError(f"step {number} at length {length} is not that of {fitted} with other sizes")

    def _at(self, length: int, number: int) -> list[Event]:
        sizes = numpy.rint(numpy.vander([length], 3)[0] @ self._coefficients[number])
        return [Event(age, index, int(size)) for (age, index, _), size in zip(self.events[number], sizes, strict=True)]


class Playback:
    """Plays one step after another."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self._steps: list[dict[int, Block]] = []

    def play(self, steps: Steps, length: int) -> None:
        events = steps.at(length, min(len(self._steps), STEPS - 1))
        self._steps.append({})
        for age, number, size in events:
            if size:
                self._steps[-1][number] = self.allocator.allocate(size)
            else:
                self.allocator.free(self._steps[-1 - age].pop(number))

    def forget(self) -> None:
        """Free all that the steps have left behind. The next step is a first one."""
        for block in [block for step in self._steps for block in step.values()]:
            self.allocator.free(block)
        self._steps.clear()
