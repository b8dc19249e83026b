"""Packed batches: whole items that fill a budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler, LengthBatchStream, SequenceSource
from seqwarm_kernels.data.batch_planning.packed import pack

from .made import first_batches, items_of, lengths_lists, served_with_restarts


def first_fit_decreasing(lengths, max_tokens):
    """The textbook algorithm: put each item, longest first, into the first pack with room for it."""
    packs = []
    for length in sorted(lengths, reverse=True):
        for content in packs:
            if sum(content) + length <= max_tokens:
                content.append(length)
                break
        else:
            packs.append([length])
    return packs


@given(lengths=lengths_lists, extra=st.integers(0, 60))
def test_the_packs_of_first_fit_decreasing(lengths, extra):
    max_tokens = max(lengths, default=1) + extra + 1
    packs = pack(np.asarray(lengths, dtype=np.int64), max_tokens)
    assert sorted(packs.order.tolist()) == list(range(len(lengths)))
    found = [
        [lengths[item] for item in packs.order[begin:end].tolist()]
        for begin, end in zip(packs.boundaries[:-1], packs.boundaries[1:], strict=True)
    ]
    expected = first_fit_decreasing(lengths, max_tokens)
    assert [sum(content) for content in found] == [sum(content) for content in expected]
    assert [[n for n in content if n] for content in found] == [[n for n in content if n] for content in expected]


def test_items_of_equal_length_keep_their_order():
    """NumPy's other kinds of sorting move equal numbers differently on each kind of CPU."""
    lengths = np.tile([5, 9, 7], 1000)
    order = pack(lengths, 100).order
    for length in (5, 7, 9):
        items = order[lengths[order] == length]
        assert (np.diff(items) > 0).all()


@pytest.mark.parametrize("window", [None, 10_000])
def test_packs_are_full_and_have_no_padding(window):
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(4, 1, 50_000).astype(int).clip(1, 4000)
    planner = BatchPlanner(16384, packed=True)
    batches = list(LengthBatchSampler(lengths, planner, window=window))
    tokens = [int(lengths[batch].sum()) for batch in batches]
    assert max(tokens) <= 16384
    assert sum(tokens) >= 0.99 * 16384 * len(batches)
    assert sorted(items_of(batches)) == list(range(len(lengths)))
    assert planner.plan(lengths).padded_tokens.sum() == lengths.sum()


def test_a_window_ends_where_its_last_pack_is_full():
    """Ten items fill a pack. A window of 25 makes two packs, and no third one that is half empty."""
    sampler = LengthBatchSampler([10] * 100, BatchPlanner(100, packed=True), window=25)
    assert [len(batch) for batch in sampler] == [10] * 10


def test_no_window_leaves_a_pack_half_empty():
    """If the items do not fill all packs, a window ends a few items earlier."""
    lengths = np.random.default_rng(0).integers(30, 200, 10_000)
    batches = list(LengthBatchSampler(lengths, BatchPlanner(2048, packed=True), window=500))
    tokens = [int(lengths[batch].sum()) for batch in batches]
    assert sum(count < 0.9 * 2048 for count in tokens) <= 1


def test_a_window_smaller_than_a_pack():
    sampler = LengthBatchSampler([10] * 7, BatchPlanner(100, packed=True), window=3)
    assert [len(batch) for batch in sampler] == [3, 3, 1]


def without_tokens(lengths, batches):
    """The numbers of the batches whose items have no tokens."""
    lengths = np.asarray(lengths)
    return [number for number, batch in enumerate(batches) if not lengths[batch].any()]


class TestItemsWithoutTokens:
    """A window of nothing else was a batch without tokens, on which models raise an error."""

    def test_they_are_in_a_pack_with_others(self):
        lengths = [0] * 6 + [4] * 7
        batches = list(LengthBatchSampler(lengths, BatchPlanner(8, packed=True), window=3, shuffle=False))
        assert batches[0] == [6, 7, 0, 1, 2, 3, 4, 5]
        assert not without_tokens(lengths, batches)

    @given(lengths=st.lists(st.sampled_from([0, 0, 0, 0, 3, 9]), min_size=1, max_size=80), window=st.integers(1, 9))
    def test_only_the_end_of_an_epoch_may_be_a_batch_of_them(self, lengths, window):
        planner = BatchPlanner(16, packed=True)
        epochs = LengthBatchSampler(lengths, planner, window=window)
        for _ in range(2):
            batches = list(epochs)
            assert sorted(items_of(batches)) == list(range(len(lengths)))
            assert set(without_tokens(lengths, batches)) <= {len(batches) - 1}

    @given(lengths=st.lists(st.sampled_from([0, 0, 0, 0, 3, 9]), min_size=1, max_size=80), window=st.integers(1, 9))
    def test_ranks_and_restarts(self, lengths, window):
        planner = BatchPlanner(16, packed=True)

        def ranked(rank, world_size=2):
            options = {"rank": rank, "world_size": world_size, "remainder": "empty"}
            return LengthBatchSampler(lengths, planner, window=window, **options)

        alone = list(ranked(0, 1))
        by_rank = served_with_restarts(ranked, 2, list(range(1, -(-len(alone) // 2))))
        in_order = [batch for step in zip(*by_rank, strict=True) for batch in step]
        assert in_order == alone + [[]] * (len(alone) % 2)

    @pytest.mark.parametrize("unit", ["step", "token", "sample"])
    @pytest.mark.parametrize("warmup", ["bucket", "cut"])
    def test_with_a_schedule(self, unit, warmup):
        lengths = [0] * 5 + [3] * 2 + [0] * 9 + [1, 6] * 5
        scheduler = SequenceLengthScheduler(2, 8, duration=12, step_size=2, unit=unit)
        planner = BatchPlanner(8, packed=True, max_length=scheduler, warmup=warmup)
        batches = list(LengthBatchSampler(lengths, planner, window=4, shuffle=False))
        assert sorted(items_of(batches)) == list(range(len(lengths)))
        assert not without_tokens(lengths, [items_of([batch]) for batch in batches])

    def test_an_epoch_of_nothing_else(self):
        batches = list(LengthBatchSampler([0] * 9, BatchPlanner(8, packed=True), window=2, shuffle=False))
        assert batches == [list(range(9))]

    def test_an_infinite_source_of_nothing_else(self):
        source = SequenceSource([[]] * 60, infinite=True)
        batches = first_batches(LengthBatchStream(source, BatchPlanner(8, packed=True), window=30_000), 2)
        assert [len(batch) for batch in batches] == [120_000] * 2
