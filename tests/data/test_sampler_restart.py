"""Interrupted epochs of a data set, restarts, and states."""

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler, ResumableLoader

from ..support.tiers import examples
from .made import first_batches, lengths_lists, served_with_restart, served_with_restarts, through_json
from .samplers import LENGTHS, RULES, rules, sampler, windows


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


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("world_size", [1, 3])
def test_twenty_restarts(rule, window, world_size):
    rng = random.Random(f"{rule}, {window}, {world_size}")

    def make(rank):
        return sampler(rule=rule, window=window, rank=rank, world_size=world_size, remainder="empty")

    uninterrupted = [list(make(rank)) for rank in range(world_size)]
    stops = sorted(rng.sample(range(len(uninterrupted[0]) + 1), min(20, len(uninterrupted[0]) + 1)))
    assert served_with_restarts(make, world_size, stops) == uninterrupted


def test_a_restart_with_more_or_fewer_ranks():
    """Four ranks stop and two continue. Together they serve the epoch."""
    four = [sampler(rank=rank, world_size=4, window=200, remainder="empty") for rank in range(4)]
    before = [first_batches(batches, 5) for batches in four]
    two = [sampler(rank=rank, world_size=2, window=200, remainder="empty") for rank in range(2)]
    for batches in two:
        batches.load_state_dict(four[3].state_dict())
    after = [list(batches) for batches in two]
    in_order = [b for step in zip(*before, strict=True) for b in step]
    in_order += [b for step in zip(*after, strict=True) for b in step if b]
    assert in_order == list(sampler(window=200))


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


def test_a_restart_of_an_infinite_sampler():
    def make():
        return sampler(window=100, infinite=True)

    first = make()
    head = first_batches(first, 150)
    second = make()
    second.load_state_dict(through_json(first.state_dict()))
    assert head + first_batches(second, 30) == first_batches(make(), 180)
    assert first.progress.epochs > 2


def sampler_at_epoch(epoch, **options):
    batches = sampler(**options)
    batches.set_epoch(epoch)
    return batches


class TestIter:
    def test_the_next_epoch_follows_an_interrupted_one(self):
        batches = sampler(window=100)
        first_batches(batches, 5)
        assert list(batches) == list(sampler_at_epoch(1, window=100))
        assert batches.epoch == 2

    def test_after_the_last_batch_the_next_epoch_begins(self):
        """Even if no batch after the last one was requested: a loader with workers takes the state then."""
        batches = sampler(window=100)
        whole = list(sampler(window=100))
        first_batches(batches, len(whole))
        assert list(batches) == list(sampler_at_epoch(1, window=100)) != whole

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

    def test_set_epoch_keeps_a_restored_position(self):
        batches, whole = sampler(window=100), list(sampler(window=100))
        first_batches(batches, 9)
        restored = sampler(window=100)
        restored.load_state_dict(batches.state_dict())
        restored.set_epoch(0)
        assert list(restored) == whole[9:]

    def test_set_epoch_drops_a_restored_position_of_another_epoch(self):
        batches = sampler(window=100)
        first_batches(batches, 9)
        restored = sampler(window=100)
        restored.load_state_dict(batches.state_dict())
        restored.set_epoch(3)
        direct = sampler(window=100)
        direct.set_epoch(3)
        assert list(restored) == list(direct)
        assert restored.epoch == 4

    def test_set_epoch_repeats_an_epoch(self):
        batches = sampler(window=100)
        first = list(batches)
        batches.set_epoch(0)
        assert first_batches(batches, len(first)) == first  # without a request for the end
        batches.set_epoch(0)
        assert list(batches) == first

    def test_a_restored_position_is_used_once(self):
        batches, whole = sampler(window=100), list(sampler(window=100))
        first_batches(batches, 9)
        restored = sampler(window=100)
        restored.load_state_dict(batches.state_dict())
        assert first_batches(restored, 5) == whole[9:14]
        assert list(restored) == list(sampler_at_epoch(1, window=100))

    def test_the_usual_loop(self):
        batches, plain = sampler(window=100), sampler(window=100)
        for epoch in range(3):
            batches.set_epoch(epoch)
            assert list(batches) == list(plain)

    def test_saved_at_the_end_of_an_epoch(self):
        batches = sampler(window=100)
        list(batches)
        restored = sampler(window=100)
        restored.load_state_dict(through_json(batches.state_dict()))
        assert list(restored) == list(batches)
        assert restored.progress == batches.progress


def test_progress_goes_on_after_a_restart():
    batches = sampler(window=100)
    first_batches(batches, 17)
    restored = sampler(window=100)
    restored.load_state_dict(through_json(batches.state_dict()))
    assert restored.progress == batches.progress


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
    with pytest.raises(ValueError, match=r"state_dict must have the entries \['progress', .*, got \['progress'"):
        batches.load_state_dict({name: value for name, value in state.items() if name != "batches_served"})
    with pytest.raises(TypeError, match="batches_served must be an int, got str"):
        batches.load_state_dict({**state, "batches_served": "1"})
    unknown = {**state, "configuration": {**state["configuration"], "color": "red"}}
    with pytest.raises(ValueError, match="of another configuration: color is 'red' in the state, unknown here"):
        batches.load_state_dict(unknown)
    served = {**state["progress"], "batches": 10_000}
    batches.load_state_dict({**state, "progress": served, "num_items": 10, "batches_served": 10_000})
    with pytest.raises(ValueError, match="state_dict must be of the same items"):
        next(iter(batches))


HUGE, LARGE = 2**62, 2**40
AT_MOST = f"must be at most {2**53}, got {HUGE}"


def changed(state, change):
    """`state` with other values at some paths, such as "counts.items"."""
    state = through_json(state)
    for path, value in change.items():
        entry = state
        *outer, name = path.split(".")
        for each in outer:
            entry = entry[each]
        entry[name] = value
    return state


def scheduled(unit="sample"):
    scheduler = SequenceLengthScheduler(8, 256, duration=600, step_size=8, unit=unit)
    return sampler(rule={"max_tokens": 512, "max_length": scheduler}, window=50)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": HUGE}, f"epoch {AT_MOST}"),
        ({"min_length": HUGE}, f"min_length {AT_MOST}"),
        ({"min_length": LARGE}, f"min_length of state_dict must be at most 256, got {LARGE}"),
        ({"counts.items": HUGE}, f"items in counts of state_dict {AT_MOST}"),
        (
            {"counts.tokens": LARGE},
            "tokens of state_dict must increase from epoch_start_counts to counts to progress, got",
        ),
        ({"epoch_start_counts.items": HUGE}, f"items in epoch_start_counts of state_dict {AT_MOST}"),
        ({"epoch_start_counts.items": LARGE}, "items of state_dict must increase from epoch_start_counts to counts"),
        ({"progress.items": LARGE}, "progress of state_dict must be counts and what was served of the window, "),
        ({"progress.batches": LARGE}, "progress of state_dict must be counts and what was served of the window, "),
        ({"batches_served": LARGE}, "progress of state_dict must be counts and what was served of the window, "),
        ({"progress.items": LARGE, "counts.items": LARGE}, "state_dict must have at most 700 items in an epoch, got "),
        ({"num_items": LARGE}, "state_dict must have at most 700 items in an epoch, got "),
        ({"max_length": LARGE}, f"max_length of state_dict must be at most 256, got {LARGE}"),
        ({"max_length": None}, "max_length of state_dict must be at most 256, got None"),
        (
            {"served_up_to": [[LARGE, 0]]},
            f"bounds in served_up_to of state_dict must increase up to 256, got [{LARGE}]",
        ),
        ({"served_up_to": [[256, 0], [8, 0]]}, "bounds in served_up_to of state_dict must increase up to 256, got "),
        ({"served_up_to": [[256, LARGE]]}, f"a cursor of state_dict must be at most 700, got {LARGE}"),
    ],
)
def test_numbers_that_cannot_be(change, message):
    """They were loaded. The next batch was of another length, or its error named no entry."""
    batches = scheduled()
    first_batches(batches, 8)
    state = batches.state_dict()
    assert state["batches_served"] == 1  # inside a window
    for other in (scheduled(), ResumableLoader(DataLoader(range(700), batch_sampler=scheduled()))):
        before = other.state_dict()
        with pytest.raises(ValueError, match=re.escape(message)):
            other.load_state_dict(changed(state, change))
        assert other.state_dict() == before
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_length": 1}, "min_length of state_dict must be at most 0, got 1"),
        ({"max_length": 5}, "max_length of state_dict must be None without a schedule or outside of a window, got 5"),
    ],
)
def test_lengths_of_a_schedule_that_is_not_there(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sampler().load_state_dict(changed(sampler().state_dict(), change))


@pytest.mark.parametrize("make", [sampler, lambda: ResumableLoader(DataLoader(range(700), batch_sampler=sampler()))])
def test_an_epoch_that_no_state_could_hold(make):
    with pytest.raises(ValueError, match=f"epoch {AT_MOST}"):
        make().set_epoch(HUGE)


@pytest.mark.parametrize("unit", ["step", "token", "sample"])
def test_states_at_every_batch_of_two_epochs_are_loaded(unit):
    batches, other = scheduled(unit), scheduled(unit)
    for _ in range(2):
        for _ in batches:
            other.load_state_dict(through_json(batches.state_dict()))
