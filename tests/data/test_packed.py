"""Packed batches: whole items that fill a budget."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import SequenceLengthScheduler, discrete
from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler
from seqwarm_kernels.data.batch_planning.packed import pack

from ..support.tiers import examples
from .made import items_of, lengths_lists


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


@examples(40)
@given(lengths=lengths_lists, extra=st.integers(0, 60))
def test_the_packs_of_first_fit_decreasing(lengths, extra):
    max_tokens = max(lengths, default=1) + extra + 1
    order, boundaries = pack(np.asarray(lengths, dtype=np.int64), max_tokens)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    found = [[lengths[item] for item in order[begin:end].tolist()] for begin, end in pairwise(boundaries)]
    expected = first_fit_decreasing(lengths, max_tokens)
    assert [sum(content) for content in found] == [sum(content) for content in expected]
    assert [[n for n in content if n] for content in found] == [[n for n in content if n] for content in expected]


def test_items_of_equal_length_keep_their_order():
    """NumPy's other kinds of sorting move equal numbers differently on each kind of CPU."""
    lengths = np.tile([5, 9, 7], 1000)
    order, _ = pack(lengths, 100)
    for length in (5, 7, 9):
        items = order[lengths[order] == length]
        assert (np.diff(items) > 0).all()


@pytest.mark.parametrize("window", [None, 10_000])
def test_packs_are_full_and_have_no_padding(window):
    """If the items do not fill all packs, a window ends a few items earlier: only the last pack is half empty."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(4, 1, 50_000).astype(int).clip(1, 4000)
    planner = BatchPlanner(16384, packed=True)
    batches = list(LengthBatchSampler(lengths, planner, window=window))
    tokens = [int(lengths[batch].sum()) for batch in batches]
    assert max(tokens) <= 16384
    assert sum(tokens) >= 0.99 * 16384 * len(batches)
    assert sum(count < 0.9 * 16384 for count in tokens) <= 1
    assert sorted(items_of(batches)) == list(range(len(lengths)))
    assert planner.plan(lengths).padded_tokens.sum() == lengths.sum()


def test_a_window_ends_where_its_last_pack_is_full():
    """Ten items fill a pack. A window of 25 makes two packs, and no third one that is half empty."""
    sampler = LengthBatchSampler([10] * 100, BatchPlanner(100, packed=True), window=25)
    assert [len(batch) for batch in sampler] == [10] * 10
    smaller = LengthBatchSampler([10] * 7, BatchPlanner(100, packed=True), window=3)
    assert [len(batch) for batch in smaller] == [3, 3, 1]


def test_items_without_tokens_are_in_a_pack_with_others():
    lengths = [0] * 2 + [4] * 7
    batches = list(LengthBatchSampler(lengths, BatchPlanner(8, packed=True), window=4, shuffle=False))
    assert batches[0] == [2, 3, 0, 1]
    assert sorted(items_of(batches)) == list(range(9))


@pytest.mark.parametrize("warmup", ["bucket", "cut"])
def test_a_change_of_the_length_makes_no_batch_without_tokens(warmup):
    """Here it comes after three items without tokens, which are served with the next one."""
    scheduler = SequenceLengthScheduler(4, 8, duration=5, pacing=discrete([(2, 4), (3, 6)]), unit="sample")
    planner = BatchPlanner(8, packed=True, max_length=scheduler, warmup=warmup)
    batches = LengthBatchSampler([3, 3, 0, 0, 0, 4, 4], planner, window=6, shuffle=False)
    assert [sorted(items_of([batch])) for batch in batches] == [[0, 1], [2, 3, 4, 5], [6]]
