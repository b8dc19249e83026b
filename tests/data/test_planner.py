"""Plans of one window."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.data import BatchPlanner
from seqwarm_kernels.data.batch_planning.plan import as_lengths

from ..support.tiers import examples
from .made import lengths_lists


def test_where_items_have_to_end():
    """Where one is truncated, nowhere. Lengths of 64 bits are not copied."""
    lengths = np.array([1, 2, 3, 4, 9])
    assert BatchPlanner(16, max_length=3).ends(lengths).tolist() == [1, 2, -1, -1, -1]
    assert np.shares_memory(as_lengths(lengths), lengths)


def rounded(length, multiple):
    return max(-(-length // multiple), 1) * multiple


def greedy_batches(lengths, max_tokens, multiple=1, batch_size=2**60):
    """infinibatch's rule: sort, then take as many rows as the longest one of the batch allows."""
    rows = sorted((rounded(length, multiple) for length in lengths), reverse=True)
    batches = []
    while rows:
        count = min(max_tokens // rows[0], batch_size)
        batches.append(rows[:count])
        rows = rows[count:]
    return batches


def pieces_of(plan):
    return [list(zip(*(part.tolist() for part in plan.batch(b)), strict=True)) for b in range(len(plan))]


def check_covers(pieces, lengths, keeps):
    """Every item is planned once, in consecutive pieces with `keeps(item)` tokens."""
    tokens = [0] * len(lengths)
    for item, start, length in sorted(piece for batch in pieces for piece in batch):
        assert start == tokens[item]
        tokens[item] += length
    seen = [item for batch in pieces for item, _, _ in batch]
    assert sorted(set(seen)) == list(range(len(lengths)))
    assert tokens == [keeps(item) for item in range(len(lengths))]


@examples(40)
@given(
    lengths=lengths_lists,
    room=st.integers(1, 6),
    multiple=st.integers(1, 9),
    batch_size=st.none() | st.integers(1, 6),
    seed=st.none() | st.integers(0, 9),
)
def test_every_item_once_and_within_the_budget(lengths, room, multiple, batch_size, seed):
    max_tokens = room * rounded(max(lengths, default=1), multiple) + room % multiple
    planner = BatchPlanner(max_tokens, batch_size=batch_size, multiple_of=multiple)
    plan = planner.plan(lengths, seeds=None if seed is None else (seed,))
    pieces = pieces_of(plan)
    check_covers(pieces, lengths, keeps=lengths.__getitem__)
    for batch, padded_tokens in zip(pieces, plan.padded_tokens.tolist(), strict=True):
        widths = [rounded(length, multiple) for _, _, length in batch]
        assert widths[0] == max(widths)
        assert len(batch) * max(widths) == padded_tokens <= max_tokens
        assert len(batch) <= (batch_size or len(batch))
    if seed is None:
        longest = [batch[0][2] for batch in pieces]
        assert [rounded(n, multiple) for n in longest] == sorted((rounded(n, multiple) for n in longest), reverse=True)


def least_tokens(widths, max_tokens, batches, max_rows):
    """Padded tokens of the best partition into this number of batches. Every boundary is tried."""
    infinite = np.int64(2**60)
    best = np.append(np.int64(0), np.full(len(widths), infinite))
    for _ in range(batches):
        longer = np.full(len(widths) + 1, infinite)
        for begin in np.flatnonzero(best[:-1] < infinite):
            rows = np.arange(1, min(max_tokens // widths[begin], len(widths) - begin, max_rows) + 1)
            ends = slice(begin + 1, begin + 1 + len(rows))
            longer[ends] = np.minimum(longer[ends], best[begin] + rows * widths[begin])
        best = longer
    return int(best[-1])


@examples(60)
@given(
    lengths=lengths_lists,
    room=st.integers(1, 200),
    multiple=st.integers(1, 9),
    batch_size=st.just(120) | st.integers(1, 9),
)
def test_as_many_batches_as_the_greedy_rule_and_less_padding(lengths, room, multiple, batch_size):
    max_tokens = room + rounded(max(lengths, default=1), multiple)
    plan = BatchPlanner(max_tokens, multiple_of=multiple, batch_size=batch_size).plan(lengths)
    greedy = greedy_batches(lengths, max_tokens, multiple, batch_size)
    assert len(plan) == len(greedy)
    assert plan.padded_tokens.sum() <= sum(len(rows) * rows[0] for rows in greedy)
    if len(plan) <= 16:
        widths = np.array(sorted((rounded(length, multiple) for length in lengths), reverse=True), np.int64)
        assert plan.padded_tokens.sum() == least_tokens(widths, max_tokens, len(plan), batch_size)


def test_more_widths_than_are_tried():
    """Thousands of widths in each batch: every tenth or so is tried, and that is nearly as good as all of them."""
    lengths = np.arange(10_000, 0, -1)
    plan = BatchPlanner(8_000_000).plan(lengths)
    greedy = sum(len(rows) * rows[0] for rows in greedy_batches(lengths.tolist(), 8_000_000))
    best = least_tokens(lengths, 8_000_000, len(plan), len(lengths))
    assert best <= plan.padded_tokens.sum() < best + 0.01 * (greedy - best)


def test_the_last_boundaries_of_many_batches_are_moved():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(4, 1, 5000).astype(int).clip(1, 2000)
    greedy = greedy_batches(lengths.tolist(), 8192)
    plan = BatchPlanner(8192).plan(lengths)
    assert len(plan) == len(greedy) > 40
    assert plan.padded_tokens.sum() < sum(len(rows) * rows[0] for rows in greedy)


@pytest.mark.parametrize(
    ("settings", "lengths", "items"),
    [
        ({"batch_size": 2}, [1, 70_000, 2, 65_537, 65_536], [1, 3, 4, 2, 0]),
        ({"batch_size": 2}, [1, 65_537, 2], [1, 2, 0]),  # as far apart as 2**16
        ({"batch_size": 6, "multiple_of": 4}, [1, 6, 4, 5, 3, 8], [1, 3, 5, 0, 2, 4]),  # equal widths keep their order
        ({"batch_size": 3}, [5, 1, 9, 2, 7, 7, 3], [2, 4, 5, 0, 6, 3, 1]),
        ({"batch_size": 6}, [5, 9] * 500, [*range(1, 1000, 2), *range(0, 1000, 2)]),
        ({"batch_size": 2}, [], []),
        ({"max_tokens": 9, "packed": True}, [], []),
    ],
)
def test_the_order_of_items(settings, lengths, items):
    assert BatchPlanner(**settings).plan(lengths).items.tolist() == items


@examples(40)
@given(
    lengths=lengths_lists,
    max_tokens=st.integers(1, 30),
    max_length=st.none() | st.integers(1, 30),
    too_long=st.sampled_from(["split", "truncate"]),
    multiple=st.integers(1, 4),
    packed=st.booleans(),
)
def test_items_that_are_cut(lengths, max_tokens, max_length, too_long, multiple, packed):
    multiple = 1 if packed else min(multiple, max_tokens)
    planner = BatchPlanner(max_tokens, multiple_of=multiple, too_long=too_long, packed=packed)
    plan = planner.plan(lengths, max_length=max_length)
    bound = min(max_tokens // multiple * multiple, max_length or max_tokens)
    keeps = np.minimum(lengths, bound) if too_long == "truncate" else np.array(lengths, int)
    check_covers(pieces_of(plan), lengths, keeps=keeps.tolist().__getitem__)
    assert (plan.padded_tokens <= max_tokens).all()
    assert plan.whole_items().sum() == len(lengths)
    assert plan.lengths.max(initial=0) <= bound
    assert planner.tokens(np.array(lengths, int), max_length).tolist() == keeps.tolist()


def test_lengths_of_many_kinds():
    arrays = (np.array([3, 2**40], dtype=dtype) for dtype in (np.int64, np.uint64))
    for lengths in (np.array([3, 200], np.uint8), torch.tensor([3, 200]), (3, 200), *arrays):
        plan = BatchPlanner(6, too_long="truncate").plan(lengths)
        assert plan.lengths.tolist() == [6, 3]
        assert plan.tokens().dtype == plan.whole_items().dtype == plan.padded_tokens.dtype == np.int64


def test_seeds_shuffle_batches_and_nothing_else():
    lengths = list(range(1, 60))
    plan = BatchPlanner(64).plan(lengths)
    shuffled = BatchPlanner(64).plan(lengths, seeds=(3, 0))
    assert pieces_of(plan) != pieces_of(shuffled)
    assert sorted(pieces_of(plan)) == sorted(pieces_of(shuffled))
    assert pieces_of(shuffled) == pieces_of(BatchPlanner(64).plan(lengths, seeds=(3, 0)))
    assert pieces_of(shuffled) != pieces_of(BatchPlanner(64).plan(lengths, seeds=(3, 1)))
    plan = BatchPlanner(8).plan([8, 7, 6, 5, 4, 3], seeds=(1, 2))
    assert [batch[0][0] for batch in pieces_of(plan)] == [3, 2, 1, 4, 0]  # on every machine


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("max_tokens or batch_size", {}),
        *(("max_tokens", {"max_tokens": value}) for value in (0, 1.5)),
        ("batch_size", {"batch_size": 0}),
        ("multiple_of", {"max_tokens": 4, "multiple_of": 0}),
        ("multiple_of", {"max_tokens": 4, "multiple_of": 8}),
        ("too_long", {"max_tokens": 4, "too_long": "drop"}),
        *(("warmup", {"max_tokens": 4, "max_length": 3, "warmup": value}) for value in ("up", "bucket")),
        *(("max_length", {"max_tokens": 4, "max_length": value}) for value in (0, "4")),
        ("max_length", {"max_tokens": 20, "multiple_of": 8, "max_length": 17}),
        ("max_length", {"max_tokens": 20, "max_length": SequenceLengthScheduler(8, 32, duration=10)}),
        ("packed", {"batch_size": 4, "packed": True}),
        ("packed", {"max_tokens": 8, "batch_size": 4, "packed": True}),
        ("packed", {"max_tokens": 8, "multiple_of": 4, "packed": True}),
    ],
)
def test_bad_settings(name, settings):
    with pytest.raises((TypeError, ValueError), match=name):
        BatchPlanner(**settings)


@pytest.mark.parametrize(
    "lengths",
    [
        *([1.0, 2.0], [[1, 2]], [0, -2, -3], [True], [[1], [1, 2]], np.array([1, 2**63], np.uint64), 5, "12", {1: 2}),
        *(torch.tensor([1, 2]).to_sparse(), torch.tensor([1, 2], device="meta"), torch.ones(2, dtype=torch.bfloat16)),
    ],
)
def test_bad_lengths(lengths):
    with pytest.raises((TypeError, ValueError)):
        BatchPlanner(8).plan(lengths)


def test_the_item_that_is_too_long_is_named():
    """The first one that is negative or too long, where padding to a multiple counts."""
    for name, planner, lengths in (
        ("item 12", BatchPlanner(500, max_length=100), [100, 3, 101, 400]),
        ("item 11", BatchPlanner(20, multiple_of=8), [16, 17]),
        ("item 10", BatchPlanner(5), [7, 9, 8]),
    ):
        with pytest.raises(ValueError, match=name):
            planner.check(np.array(lengths), first_item=10)
    with pytest.raises(ValueError, match="item 2"):
        BatchPlanner(8).plan([0, -2, -3])
