"""Memory over a ramp, from a replay of the policy of PyTorch's caching allocator. A replay, not a measurement.

The policy (c10/cuda/CUDACachingAllocator.cpp, default settings): sizes are rounded up to 512 bytes; blocks of at most
1 MiB and larger ones have separate pools; a request takes the smallest free block of its pool that is large enough,
and splits it if the rest is worth keeping; without such a block, the device is asked for a new segment; a freed block
is merged with its free neighbors and kept. If the device has no room for a segment, all segments without a block in use
are given back first.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.utils.figures import PLAIN_NUMBERS, new_figure

from ..common.figures import label_lines, mark, plot, save_both

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WITH, WITHOUT = "with warmup_allocator", "without warmup_allocator"
MIB = 2**20
CAPACITY = 80 * 10**9


# ---- the policy


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    size: int
    is_small: bool
    address: int
    is_free: bool = True
    before: Block | None = None
    after: Block | None = None


#: Size, address, block, sorted: addresses differ, so blocks are not compared.
_Pool = list[tuple[int, int, Block]]


@dataclass
class CachingAllocator:
    """The policy, without memory."""

    capacity: int  #: bytes of the device
    reserved: int = 0  #: bytes of all segments
    in_use: int = 0
    peak: int = 0  #: most bytes in use so far
    device_calls: int = 0  #: number of segments that the device was asked for or given back
    _free: tuple[_Pool, _Pool] = field(default_factory=lambda: ([], []))  #: large and small blocks
    _next_address: int = 0

    def allocate(self, size: int) -> Block:
        size = _rounded(size, 512)
        is_small = size <= MIB
        pool = self._free[is_small]
        index = bisect.bisect_left(pool, (size,))
        block = pool.pop(index)[2] if index < len(pool) else self._new_segment(size, is_small)
        rest = block.size - size
        if rest >= 512 if is_small else rest > MIB:
            self._split(block, size)
        block.is_free = False
        self.in_use += block.size
        self.peak = max(self.peak, self.in_use)
        return block

    def free(self, block: Block) -> None:
        self.in_use -= block.size
        block.is_free = True
        if block.after is not None and block.after.is_free:
            self._take(block.after)
            self._merge(block, block.after)
        if block.before is not None and block.before.is_free:
            self._take(block.before)
            block = self._merge(block.before, block)
        self._keep(block)

    def release_unused(self) -> None:
        """Give the segments without a block in use back to the device."""
        for _, _, block in [*self._free[False], *self._free[True]]:
            if block.before is None and block.after is None:
                self._take(block)
                self.reserved -= block.size
                self.device_calls += 1

    def _new_segment(self, size: int, is_small: bool) -> Block:
        segment = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else _rounded(size, 2 * MIB)
        if self.reserved + segment > self.capacity:
            self.release_unused()
        if self.reserved + segment > self.capacity:
            raise MemoryError(f"{segment} bytes do not fit: {self.reserved} of {self.capacity} bytes are in use")
        self.reserved += segment
        self.device_calls += 1
        address, self._next_address = self._next_address, self._next_address + segment
        return Block(segment, is_small, address)

    def _keep(self, block: Block) -> None:
        bisect.insort(self._free[block.is_small], (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        pool = self._free[block.is_small]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.is_small, block.address + size, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._keep(rest)

    def _merge(self, first: Block, second: Block) -> Block:
        first.size, first.after = first.size + second.size, second.after
        if second.after is not None:
            second.after.before = first
        return first


def _rounded(size: int, multiple: int) -> int:
    return max(1, -(-size // multiple)) * multiple


# ---- a training step


@dataclass(frozen=True)
class Training:
    """A GPT in bfloat16 with float32 weights, gradients and two moments. The default has GPT-2 small's size."""

    layers: int = 12
    width: int = 768
    vocabulary: int = 50257
    batch_size: int = 16

    def weights(self) -> list[int]:
        """Bytes of each weight."""
        per_layer = [3 * self.width**2, self.width**2, 4 * self.width**2, 4 * self.width**2]
        return [4 * count for count in [self.vocabulary * self.width, *(per_layer * self.layers)]]

    def step(self, allocator: CachingAllocator, length: int) -> None:
        """Forward and backward. Every layer keeps its activations until its backward."""
        row = 2 * self.batch_size * length * self.width  # bytes of one hidden state
        kept: list[list[Block]] = []
        for _ in range(self.layers):
            # norm, queries with keys and values, attention, projection, norm, MLP before and after its activation, MLP
            kept.append([allocator.allocate(size * row) for size in (1, 3, 1, 1, 1, 4, 4, 1)])
        logits = 2 * self.batch_size * length * self.vocabulary
        scores = [allocator.allocate(size) for size in (logits, 2 * logits, 2 * logits)]  # and in float32, and softmax
        gradient = allocator.allocate(row)
        for block in scores:
            allocator.free(block)
        for blocks in reversed(kept):
            gradients = [allocator.allocate(size * row) for size in (4, 4, 1, 1, 3, 1)]
            for block in (gradient, *blocks, *gradients[:-1]):
                allocator.free(block)
            gradient = gradients[-1]
        allocator.free(gradient)


@dataclass(frozen=True)
class Ramp:
    """Memory after each step of a ramp."""

    lengths: list[int]
    reserved: list[int]  #: bytes
    peaks: list[int]  #: most bytes in use so far
    device_calls: list[int]  #: so far, those before the first step left out


def replay(training: Training, lengths: Sequence[int], capacity: int, *, warmed: bool) -> Ramp:
    """Train one step at each length. With `warmed`, uncounted steps at the longest and at each length come before."""
    allocator, ramp = CachingAllocator(capacity), Ramp(list(lengths), [], [], [])
    for size in training.weights():
        for _ in range(4):  # weight, gradient, two moments
            allocator.allocate(size)
    for length in (max(lengths), *sorted(lengths)) if warmed else ():
        training.step(allocator, length)
    before = allocator.device_calls
    for length in lengths:
        training.step(allocator, length)
        ramp.reserved.append(allocator.reserved)
        ramp.peaks.append(allocator.peak)
        ramp.device_calls.append(allocator.device_calls - before)
    return ramp


# ---- the figure


def draw(folder: Path) -> Path:
    scheduler = SequenceLengthScheduler(8, 1024, duration=127, step_size=8)
    lengths = [milestone.seq_length for milestone in scheduler.milestones()]
    ramps = {name: replay(Training(), lengths, CAPACITY, warmed=name == WITH) for name in (WITHOUT, WITH)}
    return save_both(functools.partial(ramp_figure, ramps), folder / "allocator_replay.png")


def ramp_figure(ramps: dict[str, Ramp]) -> Figure:
    """Above: memory that the allocator holds. Below: its calls of the device, each of which stalls training."""
    figure = new_figure(9, 6.4)
    memory, calls = figure.subplots(2, 1, sharex=True)
    for name, ramp in ramps.items():
        every = max(1, len(ramp.lengths) // 16)
        plot(memory, name, ramp.lengths, [size / 1e9 for size in ramp.reserved], markevery=every)
        plot(calls, name, ramp.lengths, ramp.device_calls, markevery=every)
    memory.set(ylabel="memory held (GB)", ylim=(0, 1.15 * CAPACITY / 1e9))
    mark(memory, "all memory of the device", y=CAPACITY / 1e9, at=0.02)
    calls.set(
        ylabel="segments allocated or\nreleased since step 1", xlabel="sequence length (tokens), one step at each"
    )
    calls.set_ylim(bottom=-0.05 * max(1, *(ramp.device_calls[-1] for ramp in ramps.values())))
    for axes in (memory, calls):
        axes.xaxis.set_major_formatter(PLAIN_NUMBERS)
        axes.yaxis.set_major_formatter(PLAIN_NUMBERS)
    label_lines([memory, calls], bold=WITH)
    figure.suptitle("A ramp to 1,024 tokens: a replay of the allocator's policy, not a measurement")
    return figure
