"""Lengths of a schedule at each progress, their milestones, and bad settings."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import DataLoader

from seqwarm_kernels import SequenceLengthScheduler, cyclic, discrete, doubling, exponential, grow_p2, root

from ..support.tiers import examples

settings_of = st.fixed_dictionaries(
    {
        "min_seq_length": st.integers(1, 300),
        "duration": st.integers(0, 50) | st.integers(1, 10**9) | st.floats(1, 50),
        "step_size": st.sampled_from([1, 8, 64]) | st.integers(1, 400),
        "unit": st.sampled_from(["step", "token", "sample"]),
    }
)


@examples(50)
@given(settings=settings_of, more=st.integers(0, 3000), degree=st.none() | st.floats(0.3, 5), data=st.data())
def test_lengths_follow_the_formula(settings, more, degree, data):
    """In exact fractions for "linear", so that it loses no step to rounding: `degree` is that of a root."""
    low, duration, step = (settings[name] for name in ("min_seq_length", "duration", "step_size"))
    high = low + more
    pacing = "linear" if degree is None else root(degree)
    scheduler = SequenceLengthScheduler(**settings, max_seq_length=high, pacing=pacing)
    assert scheduler.seq_length_at(0) == (low if duration else high)
    progresses = sorted(data.draw(st.lists(st.integers(0, 2 * int(duration) + 1))))
    lengths = [scheduler.seq_length_at(progress) for progress in progresses]
    assert lengths == sorted(lengths)
    for progress, length in zip(progresses, lengths, strict=True):
        share = Fraction(progress) / Fraction(duration) if progress < duration else 1
        reached = more * (share if degree is None else float(share) ** (1 / degree)) / step
        nearby = {reached} if degree is None else {reached * (1 - 2**-49), reached * (1 + 2**-49)}
        by_formula = {min(high, low + step * math.floor(each)) for each in nearby}
        assert length in (by_formula if progress < duration else {high})


@examples(30)
@given(data=st.data(), low=st.integers(1, 300), more=st.integers(0, 3000), spare=st.integers(0, 500))
def test_discrete_stages_are_taken_as_given(data, low, more, spare):
    lengths = [low, *sorted(data.draw(st.lists(st.integers(low, low + more), max_size=5)))]
    stages = [(data.draw(st.integers(1, 200)), length) for length in lengths]
    by_unit = [length for units, length in stages for _ in range(units)]
    scheduler = SequenceLengthScheduler(low, low + more, duration=len(by_unit) + spare, pacing=discrete(stages))
    assert [scheduler.seq_length_at(n) for n in range(len(by_unit))] == by_unit
    assert {scheduler.seq_length_at(len(by_unit) + n) for n in (0, spare, 10**9)} == {low + more}


def lengths_of(pacing, duration, **settings):
    scheduler = SequenceLengthScheduler(8, 64, duration=duration, pacing=pacing, **settings)
    return [scheduler.seq_length_at(n) for n in range(duration + 1)]


def test_exponential_and_doubling():
    assert lengths_of(doubling(3), 8, step_size=1) == [8, 8, 16, 16, 32, 32, 64, 64, 64]
    assert lengths_of(exponential(8), 5, step_size=1) == [8, 12, 18, 27, 42, 64]  # 8 · 8^(n / 5)
    assert lengths_of("sine", 7, step_size=1) == [8, 20, 32, 42, 51, 58, 62, 64]


def test_rounding_of_a_pacing_makes_no_length_late():
    exact = SequenceLengthScheduler(64, 1024, duration=40, step_size=8, pacing=exponential(16))
    assert exact.seq_length_at(30) == 512  # 64 · 16^(3/4)
    assert SequenceLengthScheduler(8, 1032, duration=30, pacing="sine").seq_length_at(10) == 520  # sin(30°) = 1/2


def test_lengths_fall_at_a_new_cycle():
    assert lengths_of(cyclic(doubling(3), 2), 8) == [8, 16, 32, 64, 8, 16, 32, 64, 64]
    assert lengths_of(cyclic("linear", 3), 6) == [8, 32, 8, 32, 8, 32, 64]
    scheduler = SequenceLengthScheduler(8, 1024, duration=10**9, unit="token", pacing=cyclic(doubling(7), 8))
    starts = [milestone for milestone in scheduler.milestones() if milestone.seq_length == 8]
    assert starts == [(10**9 * cycle // 8, 8) for cycle in range(8)]
    assert len(scheduler.milestones()) == 8 * 8


def test_lengths_that_are_drawn():
    """Each as often as the others in a cycle, in an order of the seed, short ones rather at first."""
    pacing = grow_p2(3, 50, 20, seed=1)
    lengths = lengths_of(pacing, 4000)[:-1]
    assert grow_p2(3, 50, 20, seed=1).order == pacing.order
    assert grow_p2(3, 50, 20).order == grow_p2(3, 50, 20, seed=0).order != pacing.order
    for start in range(0, 4000, 80):
        cycle = lengths[start : start + 80]
        assert [cycle.count(length) for length in (8, 16, 32, 64)] == [20] * 4
    assert lengths[:80] != lengths[80:160]
    first = [lengths[80 * cycle] for cycle in range(50)]
    assert first.count(8) > first.count(32) + first.count(64) > 0  # odds of 8 : 4 : 2 : 1
    drawn = grow_p2(1, 3000, 1, seed=1).order[::2]
    assert drawn.count(0) / 3000 == pytest.approx(2 / 3, abs=0.03)


def test_a_user_defined_pacing_is_clamped():
    scheduler = SequenceLengthScheduler(8, 64, duration=10, pacing=lambda x: 3 * float(x) - 1)
    assert [scheduler.seq_length_at(n) for n in range(11)] == [8, 8, 8, 8, 16, 32, 48, 64, 64, 64, 64]


def test_where_a_pacing_fails_nothing_changes():
    def pacing(x):
        return float("nan") if x == Fraction(3, 10) else x / (1 if x < 0.5 else 0)

    scheduler = SequenceLengthScheduler(8, 64, duration=10, pacing=pacing)
    scheduler.step(2)
    for error, change in (
        (ValueError, scheduler.step),
        (ValueError, lambda: setattr(scheduler, "progress", 3)),
        (ZeroDivisionError, lambda: scheduler.step(4)),
    ):
        with pytest.raises(error):
            change()
        assert (scheduler.progress, scheduler.seq_length) == (2, 16)
    for error, first in ((ValueError, math.nan), (TypeError, "1")):
        with pytest.raises(error, match=r"pacing must return .* at progress 0"):
            SequenceLengthScheduler(8, 64, duration=10, pacing=lambda x, first=first: first)


@pytest.mark.parametrize("number", [np.float32(2.5), np.int64(2), Fraction(5, 2)])
def test_progress_of_other_types(number):
    for pacing in ("linear", discrete([(2, 8), (1, 16)])):
        scheduler = SequenceLengthScheduler(8, 64, duration=10, step_size=1, pacing=pacing)
        assert scheduler.seq_length_at(number) == scheduler.seq_length_at(float(number))
        with pytest.raises(ValueError, match="progress"):
            scheduler.seq_length_at(-number)
        with pytest.raises(TypeError, match=r"^progress "):
            scheduler.seq_length_at("3")


def test_a_duration_shorter_than_the_number_of_lengths_jumps():
    scheduler = SequenceLengthScheduler(8, 1024, duration=3)
    assert [scheduler.seq_length_at(n) for n in range(5)] == [8, 344, 680, 1024, 1024]
    assert scheduler.milestones() == [(0, 8), (1, 344), (2, 680), (3, 1024)]
    assert SequenceLengthScheduler(8, 1024, duration=0).milestones() == [(0, 1024)]


rising = st.sampled_from(["linear", "sine", root(2), root(0.5), exponential(100), doubling(3), lambda x: float(x) ** 2])
drawn = st.builds(grow_p2, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), seed=st.integers(0, 5))
falling = st.just(lambda x: abs(math.sin(20 * float(x))))
pacings = rising | drawn | falling | st.builds(cyclic, rising, st.integers(1, 9))


@examples(40)
@given(
    low=st.integers(1, 50),
    extra=st.integers(0, 200),
    duration=st.integers(0, 300) | st.just(10.5),
    step=st.integers(1, 20),
    pacing=pacings,
)
def test_milestones_are_all_changes(low, extra, duration, step, pacing):
    scheduler = SequenceLengthScheduler(low, low + extra, duration=duration, step_size=step, pacing=pacing)
    changes = [(0, scheduler.seq_length_at(0))]
    for n in range(1, int(duration) + 2):
        if scheduler.seq_length_at(n) != changes[-1][1]:
            changes.append((n, scheduler.seq_length_at(n)))
    assert scheduler.milestones() == changes


def test_milestones_that_are_closer_than_the_grid_of_a_function():
    """In each of 30 cycles of 333,333 units, 7 lengths; all but the first share the last 650 units."""
    scheduler = SequenceLengthScheduler(8, 64, duration=10**7, unit="token", pacing=cyclic(root(0.001), 30))
    lengths = [milestone.seq_length for milestone in scheduler.milestones()]
    assert lengths == [*range(8, 64, 8)] * 30 + [64]


def test_milestones_of_long_durations_are_found_quickly():
    milestones = SequenceLengthScheduler(8, 1024, duration=10**12, unit="token").milestones()
    assert [length for _, length in milestones] == list(range(8, 1025, 8))
    milestones = SequenceLengthScheduler(8, 24, duration=2**53, unit="token").milestones()
    assert milestones == [(0, 8), (2**52, 16), (2**53, 24)]


@pytest.mark.parametrize("options", [{"tracing_mode": "real"}, {"tracing_mode": "fake", "pre_dispatch": True}])
def test_resize_in_a_trace(options):
    scheduler, ids = SequenceLengthScheduler(8, 32, duration=100), torch.arange(64).view(2, 32)
    trace = make_fx(lambda x: scheduler.resize({"input_ids": x, "labels": x})["labels"], **options)
    assert trace(ids)(ids + 1).equal(ids[:, :8] + 1)


BAD_SETTINGS = [
    ({"min_seq_length": 0}, ValueError, "min_seq_length"),
    ({"min_seq_length": 9, "max_seq_length": 8}, ValueError, "max_seq_length"),
    ({"max_seq_length": 10.0}, TypeError, "max_seq_length"),
    *(({"duration": duration}, ValueError, "duration") for duration in (-1, 0.3, float("inf"), 2**53 + 1)),
    ({"duration": "30%"}, TypeError, "duration"),
    ({"step_size": 0}, ValueError, "step_size"),
    ({"unit": "epoch"}, ValueError, "unit"),
    *(({"pacing": pacing}, ValueError, "pacing must be") for pacing in ("quadratic", root)),
    ({"pacing": discrete([(60, 8), (60, 16)])}, ValueError, "duration must cover the stages of pacing, 120 units"),
    ({"pacing": discrete([(10, 4)])}, ValueError, "stages must have lengths from 8 to 1024"),
]


@pytest.mark.parametrize(("settings", "error", "message"), BAD_SETTINGS)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        SequenceLengthScheduler(**{"duration": 100, **settings})


BAD_PACINGS = [
    (lambda: root(0), ValueError, "degree"),
    (lambda: exponential(1), ValueError, "ratio"),
    (lambda: doubling(0), ValueError, "times"),
    (lambda: cyclic("linear", 0), ValueError, "cycles"),
    (lambda: grow_p2(0, 1, 1), ValueError, "times"),
    (lambda: grow_p2(1, 0, 1), ValueError, "cycles"),
    (lambda: grow_p2(1, 1, 0), ValueError, "draws"),
    (lambda: grow_p2(1, 1, 1, seed=0.5), TypeError, "seed"),
    (lambda: cyclic("quadratic", 2), ValueError, "pacing"),
    (lambda: cyclic(discrete([(8, 8)]), 2), ValueError, "pacing"),
    (lambda: discrete([(0, 8)]), ValueError, "units"),
    (lambda: discrete([(8, 8.5)]), TypeError, "length"),
    (lambda: discrete([(10, 64), (10, 32)]), ValueError, "stage lengths must not decrease"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD_PACINGS)
def test_bad_pacings(make, error, message):
    with pytest.raises(error, match=rf"^{message}\b"):
        make()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_does_not_know_the_length(workers):
    """Its copy of the scheduler never advances, so batches would keep the first length without a word."""
    scheduler, batch = SequenceLengthScheduler(8, 64, duration=10), {"input_ids": torch.zeros(1, 64)}
    scheduler.step(5)

    def loaded(item, collate):
        return next(iter(DataLoader([item], batch_size=None, collate_fn=collate, num_workers=workers)))

    assert loaded(5, scheduler.seq_length_at) == 32
    if workers == 0:
        assert loaded(batch, scheduler.resize)["input_ids"].shape == (1, 32)
    else:
        with pytest.raises(RuntimeError, match="not known in a DataLoader worker"):
            loaded(batch, scheduler.resize)
