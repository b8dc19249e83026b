"""Interrupted epochs of a data set, restarts, and states."""

import contextlib
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler, LengthBatchStream, SequenceSource

from ..support.tiers import examples
from .made import first_batches, lengths_lists, served_with_restart, through_json
from .samplers import LENGTHS, rules, sampler, windows


@given(
    lengths=lengths_lists,
    rule=rules,
    window=windows,
    world_size=st.integers(1, 4),
    at=st.integers(0, 60),
    remainder=st.sampled_from(["repeat", "empty"]),
)
@examples(40)
def test_the_same_order_after_a_restart(lengths, rule, window, world_size, at, remainder):
    for rank in range(world_size):

        def make(rank=rank):
            return sampler(lengths, rule, window=window, rank=rank, world_size=world_size, remainder=remainder)

        uninterrupted = list(make())
        assert served_with_restart(make, at % (len(uninterrupted) + 1)) == uninterrupted


def test_a_state_is_small_and_the_same_size_anywhere():
    lengths = np.full(100_000, 10)
    sizes = []
    for at in (0, 1, 5000, 9000):
        batches = LengthBatchSampler(lengths, BatchPlanner(100), window=1000)
        first_batches(batches, at)
        sizes.append(len(json.dumps(batches.state_dict())))
    assert max(sizes) < 700


def test_a_restart_plans_the_open_window_and_nothing_before_it(monkeypatch):
    planned = []
    plan = BatchPlanner.plan
    monkeypatch.setattr(
        BatchPlanner,
        "plan",
        lambda self, lengths, **options: planned.append(len(lengths)) or plan(self, lengths, **options),
    )
    batches = LengthBatchSampler(np.full(10_000, 10), BatchPlanner(100), window=500)
    first_batches(batches, 777)
    state = batches.state_dict()
    fresh = LengthBatchSampler(np.full(10_000, 10), BatchPlanner(100), window=500)
    del planned[:]
    fresh.load_state_dict(state)
    assert planned == []
    next(iter(fresh))
    assert planned == [500]


def sampler_at_epoch(epoch, **options):
    batches = sampler(**options)
    batches.set_epoch(epoch)
    return batches


class TestIter:
    @pytest.mark.parametrize("window", [None, 100])
    def test_after_the_last_step_of_several_ranks_the_next_epoch_begins(self, window):
        """The open window has batches left, but too few for all ranks."""
        batches = sampler(rule="rows", window=window, rank=0, world_size=8)
        whole = list(sampler(rule="rows", window=window, rank=0, world_size=8))
        assert len(list(sampler(rule="rows", window=window))) % 8
        first_batches(batches, len(whole))
        following = list(batches)
        assert following != whole
        assert following == list(sampler_at_epoch(1, rule="rows", window=window, rank=0, world_size=8))

    def test_the_usual_loop(self):
        batches, plain = sampler(window=100), sampler(window=100)
        for epoch in range(3):
            batches.set_epoch(epoch)
            assert list(batches) == list(plain)


@examples(20)
@given(world_size=st.integers(1, 4), at=st.integers(0, 30))
def test_every_rank_has_the_same_state(world_size, at):
    states = []
    for rank in range(world_size):
        batches = sampler(window=100, rank=rank, world_size=world_size)
        first_batches(batches, at)
        states.append(batches.state_dict())
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, "seed is 0 in the state, 1 here"),
        ({"shuffle": False}, "seed is 0 in the state, None here"),
        ({"window": 99}, "window is 100 in the state, 99 here"),
        ({"lengths": LENGTHS[:-1]}, "num_items is 700 in the state, 699 here"),
        ({"lengths": LENGTHS[::-1]}, "lengths is "),
        ({"rule": {"max_tokens": 500, "multiple_of": 8}}, "max_tokens is 512 in the state, 500 here"),
        ({"rule": {"max_tokens": 512}}, "multiple_of is 8 in the state, 1 here"),
        ({"rule": {"max_tokens": 512, "multiple_of": 8, "batch_size": 9}}, "batch_size is None in the state, 9 here"),
        (
            {"rule": {"max_tokens": 512, "multiple_of": 8, "max_length": 200}},
            "max_length is 512 in the state, 200 here",
        ),
        (
            {"rule": {"max_tokens": 512, "multiple_of": 8, "too_long": "split"}},
            "too_long is 'reject' in the state, 'split' here",
        ),
    ],
)
def test_a_state_of_another_configuration(changed, message):
    batches = sampler(window=100)
    first_batches(batches, 3)
    other = sampler(**{"window": 100, **changed})
    before = other.state_dict()
    with pytest.raises(ValueError, match=re.escape(f"state_dict is of another configuration: {message}")):
        other.load_state_dict(through_json(batches.state_dict()))
    assert other.state_dict() == before


def test_invalid_states():
    batches = sampler()
    with pytest.raises(TypeError, match="state_dict must be a mapping, got list"):
        batches.load_state_dict([])
    state = batches.state_dict()
    with pytest.raises(ValueError, match=r"state_dict must have the entries \['epoch', .*, got \['epoch'"):
        batches.load_state_dict({name: value for name, value in state.items() if name != "served"})
    unknown = {**state, "configuration": {**state["configuration"], "color": "red"}}
    with pytest.raises(ValueError, match="of another configuration: color is 'red' in the state, unknown here"):
        batches.load_state_dict(unknown)
    assert batches.state_dict() == state


def numbers_in(state, path=()):
    """The paths of the numbers of a state, beside those of its configuration."""
    for name, entry in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(entry, (dict, list)) and name != "configuration":
            yield from numbers_in(entry, (*path, name))
        elif type(entry) is int:
            yield *path, name


def infinite_stream(**options):
    source = SequenceSource([[0] * (1 + n % 30) for n in range(500)], infinite=True)
    return LengthBatchStream(source, BatchPlanner(60, **options), window=50)


def scheduled():
    scheduler = SequenceLengthScheduler(8, 200, duration=600, step_size=8, unit="sample")
    return sampler(rule={"max_tokens": 512, "max_length": scheduler}, window=50)


@pytest.mark.parametrize("number", [2**31, 2**40, 2**53])
@pytest.mark.parametrize(
    "make",
    [infinite_stream, lambda: infinite_stream(packed=True), scheduled, lambda: sampler(infinite=True, window=90)],
)
def test_a_huge_number_in_a_state_ends_soon(make, number):
    """A position of a source, or a number of items, was read up to."""
    batches = make()
    first_batches(batches, 9)
    state = through_json(batches.state_dict())
    assert (state["served"], state["epoch_start"]) != (state["window_start"],) * 2
    for *path, name in numbers_in(state):
        changed = through_json(state)
        entry = changed
        for each in path:
            entry = entry[each]
        entry[name] = number
        other = make()
        with contextlib.suppress(ValueError):
            other.load_state_dict(changed)
            assert first_batches(other, 2)


@pytest.mark.parametrize("make", [scheduled, infinite_stream])
@pytest.mark.parametrize("count", ["items", "tokens", "batches"])
def test_a_state_whose_open_window_is_another_one(make, count):
    batches = make()
    first_batches(batches, 9)
    state = through_json(batches.state_dict())
    assert state["served"] != state["window_start"]
    state["served"][count] += 1
    other = make()
    other.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(ValueError, match="state_dict must be of the same items and lengths"):
            next(iter(other))
    right = make()
    for each in (other, right):
        each.load_state_dict(batches.state_dict())
    assert first_batches(other, 3) == first_batches(right, 3)


def test_an_epoch_that_no_state_could_hold():
    with pytest.raises(ValueError, match=f"epoch must be at most {2**53}, got {2**62}"):
        sampler().set_epoch(2**62)
