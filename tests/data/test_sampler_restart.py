"""Interrupted epochs of a data set, restarts, and states."""

import contextlib
import json

import numpy as np
import pytest

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler, LengthBatchStream, SequenceSource

from .made import first_batches, through_json
from .samplers import LENGTHS, RULES, sampler


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


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("seed", {"seed": 1}),
        ("seed", {"shuffle": False}),
        ("window", {"window": 99}),
        ("num_items", {"lengths": LENGTHS[:-1]}),
        ("lengths", {"lengths": LENGTHS[::-1]}),
        ("max_tokens", {"rule": {**RULES["budget"], "max_tokens": 520, "max_length": 512}}),
        ("multiple_of", {"rule": {"max_tokens": 512}}),
        ("batch_size", {"rule": {**RULES["budget"], "batch_size": 9}}),
        ("max_length", {"rule": {**RULES["budget"], "max_length": 200}}),
        ("too_long", {"rule": {**RULES["budget"], "too_long": "split"}}),
    ],
)
def test_a_state_of_another_configuration(name, changed):
    batches = sampler(window=100)
    first_batches(batches, 3)
    other = sampler(**{"window": 100, **changed})
    before = other.state_dict()
    with pytest.raises(ValueError, match=f"configuration.* {name} "):
        other.load_state_dict(through_json(batches.state_dict()))
    assert other.state_dict() == before


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
