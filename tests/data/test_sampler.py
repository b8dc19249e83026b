"""Epochs of a data set: their order and their ranks."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler, Piece

from ..support.tiers import examples
from .made import items_of, lengths_lists
from .samplers import LENGTHS, ranks_of, rules, sampler, windows


@given(lengths=lengths_lists, rule=rules, window=windows, shuffle=st.booleans(), seed=st.integers(0, 2**40))
def test_an_epoch_holds_every_item_once(lengths, rule, window, shuffle, seed):
    batches = list(sampler(lengths, rule, window=window, shuffle=shuffle, seed=seed))
    assert all(batches)
    pieces = [entry if isinstance(entry, Piece) else Piece(entry, 0, lengths[entry]) for b in batches for entry in b]
    assert sorted({piece.item for piece in pieces}) == list(range(len(lengths)))
    assert len({(piece.item, piece.start) for piece in pieces}) == len(pieces)
    if rule.get("too_long") != "truncate":
        assert sum(piece.length for piece in pieces) == sum(lengths)
    assert sum(piece.start == 0 for piece in pieces) == len(lengths)


@given(lengths=lengths_lists, rule=rules, window=windows, world_size=st.integers(2, 5))
@examples(40)
def test_ranks_get_the_same_number_of_batches_and_no_item_twice(lengths, rule, window, world_size):
    def batches_by_rank(remainder):
        return ranks_of(
            world_size,
            lambda **rank: sampler(lengths, rule, window=window, remainder=remainder, **rank),
        )

    alone = list(sampler(lengths, rule, window=window))
    for remainder in ("drop", "repeat", "empty"):
        if remainder == "drop" and 0 < len(alone) < world_size:
            continue
        by_rank = batches_by_rank(remainder)
        assert len({len(batches) for batches in by_rank}) == 1
        in_order = [batch for step in zip(*by_rank, strict=True) for batch in step]
        count = len(alone) // world_size * world_size if remainder == "drop" else len(alone)
        assert in_order[:count] == alone[:count]
        surplus = in_order[count:]
        assert len(surplus) < world_size
        if remainder == "empty":
            assert surplus == [[]] * len(surplus)
        elif remainder == "repeat":
            assert all(batch in alone for batch in surplus)


def test_each_epoch_has_another_order():
    batches = sampler(window=100)
    first, second = list(batches), list(batches)
    assert first != second
    assert sorted(items_of(first)) == sorted(items_of(second)) == list(range(700))
    assert batches.epoch == 2
    again = sampler(window=100)
    again.set_epoch(1)
    assert list(again) == second
    assert list(islice(sampler(window=100, infinite=True), len(first) + len(second))) == first + second
    assert list(sampler(window=100, seed=1)) != first


def test_without_shuffling_the_longest_come_first():
    batches = list(LengthBatchSampler([3, 1, 2, 9, 8, 7], BatchPlanner(batch_size=2), window=3, shuffle=False))
    assert batches == [[0, 2], [1], [3, 4], [5]]


def test_batches_are_shuffled_inside_their_window():
    batches = list(sampler(window=100, rule="rows"))
    longest = [max(LENGTHS[batch]) for batch in batches[:15]]
    assert longest != sorted(longest, reverse=True)


def test_an_empty_data_set_ends_even_if_infinite():
    for infinite in (False, True):
        assert list(sampler([], infinite=infinite)) == []
        assert list(sampler([], infinite=infinite, rank=1, world_size=2, remainder="empty")) == []


def test_too_few_batches_for_the_ranks():
    for rank in range(2):
        with pytest.raises(ValueError, match="remainder"):
            list(sampler([5], rank=rank, world_size=2))


def test_progress():
    batches = sampler(window=100, rule="packed")
    steps = iter(batches)
    items = tokens = 0
    for count, batch in enumerate(steps, start=1):
        items, tokens = items + len(batch), tokens + int(LENGTHS[batch].sum())
        assert batches.progress == (items, tokens, count, pytest.approx(items / 700))
    list(batches)
    assert batches.progress == (1400, 2 * LENGTHS.sum(), batches.progress.batches, 2)
    batches = sampler(rule="split", rank=1, world_size=2, remainder="empty")
    list(batches)
    assert batches.progress[:2] == (700, LENGTHS.sum())  # items that are split count once, those of all ranks count


def test_length():
    for options in ({}, {"rank": 1, "world_size": 3}, {"rank": 1, "world_size": 3, "remainder": "repeat"}):
        batches = sampler(window=100, **options)
        assert len(batches) == len(list(batches))
        assert len(batches) == len(list(batches))
    with pytest.raises(TypeError, match="an infinite LengthBatchSampler has no length"):
        len(sampler(infinite=True))


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_lengths_that_change_later(make):
    """The plan changed with the array of the caller."""
    lengths = make([5, 1, 4, 2, 3] * 8)
    sampler, planned = (LengthBatchSampler(lengths, BatchPlanner(10), window=5) for _ in range(2))
    planned = list(planned)
    lengths[:] = 1
    assert list(sampler) == planned


def test_items_that_may_be_cut_are_pieces():
    batches = LengthBatchSampler([5, 3], BatchPlanner(4, too_long="split"), shuffle=False)
    assert list(batches) == [[Piece(0, 0, 4)], [Piece(1, 0, 3)], [Piece(0, 4, 1)]]
    assert isinstance(next(iter(batches))[0], Piece)
    assert list(LengthBatchSampler([4, 3], BatchPlanner(8), shuffle=False)) == [[0, 1]]


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("window", {"window": 0}),
        ("seed", {"seed": 1.5}),
        ("rank", {"rank": 2, "world_size": 2}),
        ("world_size", {"rank": 0}),
        ("remainder", {"remainder": "keep"}),
        *(("item 1", {"lengths": [1, length]}) for length in (900, -9)),
    ],
)
def test_bad_arguments(named, options):
    with pytest.raises((TypeError, ValueError), match=named):
        sampler(**options)
