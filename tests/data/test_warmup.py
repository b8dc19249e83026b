"""The current length follows a schedule: by bucket, or by cutting."""

from itertools import islice

import numpy as np
import pytest

from seqwarm_kernels import SequenceLengthScheduler, discrete
from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler, LengthBatchStream, Piece

from .made import ListSource, items_of

LENGTHS = np.random.default_rng(2).integers(1, 65, 6000)


def schedule(duration=30, low=8, high=64, unit="step"):
    return SequenceLengthScheduler(low, high, duration=duration, step_size=8, unit=unit)


def sampler(lengths=LENGTHS, *, scheduler=None, window=None, max_tokens=256, rank=0, world_size=1, **settings):
    planner = BatchPlanner(max_tokens, max_length=scheduler or schedule(), **settings)
    return LengthBatchSampler(lengths, planner, window=window, rank=rank, world_size=world_size, remainder="empty")


def lengths_of(batch, lengths=LENGTHS):
    return [entry.length if isinstance(entry, Piece) else int(lengths[entry]) for entry in batch]


class TestBucket:
    @pytest.mark.parametrize("window", [None, 300])
    def test_no_batch_is_longer_than_the_schedule_says(self, window):
        """A milestone takes effect in its step: from then on, items are served that were too long before."""
        scheduler, batches = schedule(), list(islice(sampler(window=window), 40))
        longest = [max(lengths_of(batch)) for batch in batches]
        for step, length in enumerate(longest):
            assert length <= scheduler.seq_length_at(step)
        for milestone in scheduler.milestones()[1:]:
            step = milestone.progress
            assert max(longest[:step]) <= milestone.seq_length - 8 < max(longest[step : step + 4])
        assert min(len(batch) * length for batch, length in zip(batches[:4], longest, strict=False)) > 0.8 * 256
        rows = LengthBatchSampler(LENGTHS, BatchPlanner(batch_size=8, max_length=scheduler), window=window)
        assert {len(batch) for batch in islice(rows, 30)} == {8}

    def test_an_epoch_without_short_items_left_goes_on_with_longer_ones(self):
        """The schedule stays at 8 for the whole epoch, so items are served in the order of the schedule's lengths."""
        epochs = sampler(LENGTHS[:1500], scheduler=schedule(10**6), window=300)
        batches = list(epochs)
        assert sorted(items_of(batches)) == list(range(1500))
        longest = [-(-max(lengths_of(batch)) // 8) * 8 for batch in batches]
        assert longest == sorted(longest)
        assert set(longest) == set(range(8, 65, 8))
        assert max(lengths_of(next(iter(epochs)))) <= 8  # the next epoch follows the schedule again

    def test_a_length_that_falls(self):
        """With a custom pacing the length may fall. Items that were short enough before are then served later."""
        scheduler = SequenceLengthScheduler(8, 64, duration=20, pacing=lambda x: 1 if x < 0.5 else 0)
        batches = list(sampler(scheduler=scheduler, window=300))
        assert max(length for batch in batches[:10] for length in lengths_of(batch)) > 32
        assert max(length for batch in batches[10:20] for length in lengths_of(batch)) <= 8
        assert sorted(items_of(batches)) == list(range(6000))

    def test_items_longer_than_every_length_of_the_schedule(self):
        with pytest.raises(ValueError, match="item 3 has 70 tokens, more than 64"):
            sampler([1, 2, 3, 70])
        batches = list(sampler([1, 2, 3, 70], too_long="truncate"))
        assert sorted(items_of(batches)) == [0, 1, 2, 3]
        assert max(length for batch in batches for length in lengths_of(batch)) == 64
        batches = list(sampler([1, 2, 3, 150], too_long="split", scheduler=schedule(0)))
        assert sorted(length for batch in batches for length in lengths_of(batch)) == [1, 2, 3, 22, 64, 64]


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("too_long", ["reject", "split"])
def test_a_schedule_that_cuts(window, too_long):
    """No batch is longer than it says, and items lose their ends while it is not over."""
    batches = list(sampler(window=window, warmup="cut", too_long=too_long))
    lengths = [max(lengths_of(batch)) for batch in batches]
    assert all(length <= schedule().seq_length_at(step) for step, length in enumerate(lengths))
    assert max(lengths[:4]) == 8
    if too_long == "reject":
        entries = [entry for batch in batches for entry in batch]
        assert sorted(entry.item for entry in entries) == list(range(6000))
        assert all(entry.start == 0 for entry in entries)
        entries = [entry for batch in sampler(window=window, warmup="cut", scheduler=schedule(0)) for entry in batch]
        assert [entry.length for entry in sorted(entries)] == LENGTHS.tolist()


@pytest.mark.parametrize("unit", ["token", "sample"])
def test_other_units(unit):
    """A length applies from the window that begins at its milestone, so no batch is longer than the schedule allows."""
    scheduler = schedule(900 if unit == "sample" else 15_000, unit=unit)
    batches = sampler(scheduler=scheduler, window=300)
    seen = 0
    for batch in batches:
        counts = batches.progress
        seen = counts.items if unit == "sample" else counts.tokens
        if seen < scheduler.duration:
            assert max(lengths_of(batch)) <= scheduler.seq_length_at(seen)


@pytest.mark.parametrize(
    ("unit", "units", "world_size", "num_items"),
    [
        ("step", 12, 1, 120),
        ("step", 12, 3, 360),
        ("step", 100, 3, 500),
        ("token", 3000, 3, 300),
        ("token", 2995, 3, 300),
        ("sample", 123, 3, 123),
    ],
)
def test_a_window_ends_at_a_milestone_and_not_before(unit, units, world_size, num_items):
    """The number of items in the first window. Items have 10 tokens, and a batch has ten items."""
    scheduler = SequenceLengthScheduler(16, 64, duration=units, pacing=discrete([(units, 16)]), unit=unit)
    batches = sampler([10] * 2000, scheduler=scheduler, window=500, max_tokens=100, world_size=world_size)
    starts = (batches.state_dict()["window_start"]["items"] for _ in batches)
    assert next(start for start in starts if start) == num_items


def test_the_scheduler_is_not_changed():
    scheduler = schedule()
    first = list(sampler(scheduler=scheduler))
    scheduler.step(1000)
    assert list(sampler(scheduler=scheduler)) == first
    assert scheduler.progress == 1000


def test_a_stream_and_a_data_set_have_the_same_batches():
    """If their items have the same order. A stream reads items again that are served later, and keeps none of them."""
    items = list(enumerate(LENGTHS.tolist()))
    planner = BatchPlanner(256, max_length=schedule())
    source = ListSource(items)
    stream = LengthBatchStream(source, planner, length=lambda item: item[1], window=300, shuffle=False)
    plain = LengthBatchSampler(LENGTHS, planner, window=300, shuffle=False)
    assert [[number for number, _ in batch] for batch in stream] == list(plain)
    assert source.reads > len(items)
