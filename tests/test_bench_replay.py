"""The replay of the allocator's policy: each rule, and the figure."""

import pytest

from bench.allocator.replay import CAPACITY, MIB, WITH, WITHOUT, CachingAllocator, Training, ramp_figure, replay
from seqwarm_kernels.utils.figures import style

TINY = Training(layers=2, width=256, vocabulary=8192, batch_size=8)
LENGTHS = range(8, 257, 8)


def test_sizes_of_segments():
    for size, segment in ((1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB + 1, 12)):
        allocator = CachingAllocator(CAPACITY)
        allocator.allocate(size)
        assert (allocator.reserved, allocator.device_calls) == (segment * MIB, 1)


def test_a_block_is_split_and_merged_again():
    allocator = CachingAllocator(CAPACITY)
    blocks = [allocator.allocate(size) for size in (1, 513, 4096)]
    assert [block.size for block in blocks] == [512, 1024, 4096]
    assert allocator.reserved == 2 * MIB
    assert allocator.in_use == allocator.peak == 5632
    for block in (blocks[1], blocks[0], blocks[2]):
        allocator.free(block)
    assert allocator.in_use == 0
    assert allocator.peak == 5632
    for _ in range(2):  # only a whole segment has room for both
        assert allocator.allocate(MIB).size == MIB
    assert allocator.device_calls == 1


def test_unused_segments_are_released_when_the_device_is_full():
    allocator = CachingAllocator(64 * MIB)
    kept = allocator.allocate(20 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(40 * MIB)
    assert (allocator.reserved, allocator.device_calls) == (60 * MIB, 4)
    with pytest.raises(MemoryError, match=r"do not fit: 62914560 of 67108864"):
        allocator.allocate(20 * MIB)
    allocator.free(kept)


def test_a_warmed_ramp_asks_for_nothing():
    warmed = replay(TINY, LENGTHS, CAPACITY, warmed=True)
    cold = replay(TINY, LENGTHS, CAPACITY, warmed=False)
    assert set(warmed.device_calls) == {0}
    assert cold.device_calls == sorted(cold.device_calls)
    assert cold.device_calls[-1] > cold.device_calls[0] > 0
    assert len(set(warmed.reserved)) == 1
    assert cold.reserved[-1] > warmed.reserved[-1] >= warmed.peaks[-1] == cold.peaks[-1]


def test_the_figure_says_that_it_is_a_replay():
    figures = pytest.importorskip("tests.support.figures")
    ramps = {name: replay(TINY, LENGTHS, CAPACITY, warmed=name == WITH) for name in (WITHOUT, WITH)}
    with style():
        figure = ramp_figure(ramps)
        figures.check_readable(figure)
        figures.check_looks(figure, {WITH, WITHOUT})
    assert "a replay of the allocator's policy, not a measurement" in figure.get_suptitle()
