"""Lengths of a schedule at each progress, their milestones, and bad settings."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from seqwarm_kernels import SequenceLengthScheduler, cyclic, discrete, doubling, exponential, grow_p2, root

RANDOM_CONFIGURATIONS = [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 200))]


def random_settings(seed):
    rng = random.Random(seed)
    low = rng.randint(1, 300)
    return {
        "min_seq_length": low,
        "max_seq_length": low + rng.choice([0, rng.randint(0, 3000)]),
        "duration": rng.choice([1, rng.randint(1, 50), rng.randint(1, 10**9)]),
        "step_size": rng.choice([1, 8, 64, rng.randint(1, 400)]),
        "unit": rng.choice(["step", "token", "sample"]),
    }


def some_progress(settings, seed):
    rng = random.Random(seed + 1)
    duration = settings["duration"]
    return sorted({0, duration - 1, duration, 2 * duration, *(rng.randint(0, duration) for _ in range(50))})


def length_by_the_formula(settings, share):
    low, high, step = (settings[name] for name in ("min_seq_length", "max_seq_length", "step_size"))
    return min(high, low + step * math.floor((high - low) * share / step))


def check_ends_and_range(scheduler, progresses):
    low, high, duration = scheduler.min_seq_length, scheduler.max_seq_length, scheduler.duration
    lengths = [scheduler.seq_length_at(n) for n in progresses]
    assert all(low <= length <= high for length in lengths)
    assert lengths == sorted(lengths)
    assert scheduler.seq_length_at(duration) == high
    assert scheduler.seq_length_at(10 * duration + 1) == high


@pytest.mark.parametrize("seed", RANDOM_CONFIGURATIONS)
def test_linear(seed):
    settings = random_settings(seed)
    scheduler, progresses = SequenceLengthScheduler(**settings), some_progress(settings, seed)
    assert scheduler.seq_length_at(0) == settings["min_seq_length"]
    check_ends_and_range(scheduler, progresses)
    for n in progresses:
        if n < settings["duration"]:
            assert scheduler.seq_length_at(n) == length_by_the_formula(settings, Fraction(n, settings["duration"]))


@pytest.mark.parametrize("seed", RANDOM_CONFIGURATIONS)
def test_root(seed):
    settings = random_settings(seed)
    degree = random.Random(seed).choice([1, 2, 3, 0.5, 1.7])
    scheduler, progresses = SequenceLengthScheduler(**settings, pacing=root(degree)), some_progress(settings, seed)
    assert scheduler.seq_length_at(0) == settings["min_seq_length"]
    check_ends_and_range(scheduler, progresses)
    for n in progresses:
        if n < settings["duration"]:
            share = (n / settings["duration"]) ** (1 / degree)
            assert scheduler.seq_length_at(n) == length_by_the_formula(settings, share)


@pytest.mark.parametrize("seed", RANDOM_CONFIGURATIONS)
def test_discrete(seed):
    rng = random.Random(seed)
    settings = random_settings(seed)
    lengths = sorted(
        rng.randint(settings["min_seq_length"], settings["max_seq_length"]) for _ in range(rng.randint(0, 5))
    )
    lengths = [settings["min_seq_length"], *lengths]
    stages = [(rng.randint(1, 1000), length) for length in lengths]
    settings["duration"] = sum(units for units, _ in stages) + rng.choice([0, rng.randint(0, 500)])
    scheduler, progresses = SequenceLengthScheduler(**settings, pacing=discrete(stages)), some_progress(settings, seed)
    assert scheduler.seq_length_at(0) == settings["min_seq_length"]
    check_ends_and_range(scheduler, progresses)
    by_unit = [length for units, length in stages for _ in range(units)]
    for n in progresses:
        assert scheduler.seq_length_at(n) == (by_unit[n] if n < len(by_unit) else settings["max_seq_length"])


def test_linear_is_exact_where_floats_are_not():
    # 0.1 + 0.2 style: 3 / 10 of 30 is 9 exactly, float64 makes it 8.999...
    scheduler = SequenceLengthScheduler(1, 101, duration=1000, step_size=1)
    assert [scheduler.seq_length_at(n) for n in range(0, 1000, 10)] == list(range(1, 101))


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
    assert lengths == lengths_of(grow_p2(3, 50, 20, seed=1), 4000)[:-1]
    assert lengths != lengths_of(grow_p2(3, 50, 20, seed=2), 4000)[:-1]
    assert grow_p2(3, 50, 20).order == grow_p2(3, 50, 20, seed=0).order
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


@pytest.mark.parametrize("first_bad", [0, 3])
def test_a_pacing_that_returns_nan_changes_nothing(first_bad):
    def pacing(x):
        return float(x) if x < first_bad / 10 else float("nan")

    message = f"pacing must return a finite number, got nan at progress {first_bad}"
    if first_bad == 0:
        with pytest.raises(ValueError, match=message):
            SequenceLengthScheduler(8, 64, duration=10, pacing=pacing)
        return
    scheduler = SequenceLengthScheduler(8, 64, duration=10, pacing=pacing)
    scheduler.step(2)
    for change in (scheduler.step, lambda: setattr(scheduler, "progress", 3)):
        with pytest.raises(ValueError, match=message):
            change()
        assert (scheduler.progress, scheduler.seq_length) == (2, 16)


@pytest.mark.parametrize("number", [np.float32(2.5), np.float64(2.5), np.float16(2.5), np.int64(2), Fraction(5, 2)])
def test_progress_of_other_types(number):
    for pacing in ("linear", discrete([(2, 8), (1, 16)])):
        scheduler = SequenceLengthScheduler(8, 64, duration=10, step_size=1, pacing=pacing)
        assert scheduler.seq_length_at(number) == scheduler.seq_length_at(float(number))


def test_duration_zero_is_full_length_at_once():
    scheduler = SequenceLengthScheduler(8, 1024, duration=0)
    assert scheduler.seq_length == 1024
    assert scheduler.milestones() == [(0, 1024)]


def test_a_duration_shorter_than_the_number_of_lengths_jumps():
    scheduler = SequenceLengthScheduler(8, 1024, duration=3)
    assert [scheduler.seq_length_at(n) for n in range(5)] == [8, 344, 680, 1024, 1024]
    assert scheduler.milestones() == [(0, 8), (1, 344), (2, 680), (3, 1024)]


rising = st.sampled_from(["linear", "sine", root(2), root(0.5), exponential(100), doubling(3), lambda x: float(x) ** 2])
drawn = st.builds(grow_p2, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), seed=st.integers(0, 5))
pacings = rising | drawn | st.builds(cyclic, rising, st.integers(1, 9))


@given(
    low=st.integers(1, 50),
    extra=st.integers(0, 200),
    duration=st.integers(0, 300),
    step=st.integers(1, 20),
    pacing=pacings,
)
def test_milestones_are_all_changes(low, extra, duration, step, pacing):
    scheduler = SequenceLengthScheduler(low, low + extra, duration=duration, step_size=step, pacing=pacing)
    assert scheduler.milestones() == changes_of(scheduler)


def changes_of(scheduler):
    changes = [(0, scheduler.seq_length_at(0))]
    for n in range(1, int(scheduler.duration) + 2):
        if scheduler.seq_length_at(n) != changes[-1][1]:
            changes.append((n, scheduler.seq_length_at(n)))
    return changes


def test_milestones_of_a_falling_pacing():
    for duration in (1000, 10.5):
        scheduler = SequenceLengthScheduler(8, 64, duration=duration, pacing=lambda x: abs(math.sin(20 * float(x))))
        assert scheduler.milestones() == changes_of(scheduler)


def test_milestones_that_are_closer_than_the_grid_of_a_function():
    """In each of 300 cycles of 333,333 units, 7 lengths; all but the first share the last 650 units."""
    scheduler = SequenceLengthScheduler(8, 64, duration=10**8, unit="token", pacing=cyclic(root(0.001), 300))
    lengths = [milestone.seq_length for milestone in scheduler.milestones()]
    assert lengths == [*range(8, 64, 8)] * 300 + [64]


def test_milestones_of_a_billion_tokens_are_found_quickly():
    milestones = SequenceLengthScheduler(8, 1024, duration=10**12, unit="token").milestones()
    assert [length for _, length in milestones] == list(range(8, 1025, 8))


def test_milestones_of_the_longest_duration():
    milestones = SequenceLengthScheduler(8, 24, duration=2**53, unit="token").milestones()
    assert milestones == [(0, 8), (2**52, 16), (2**53, 24)]


def test_resize():
    scheduler = SequenceLengthScheduler(8, 32, duration=100)
    batch = {"input_ids": torch.arange(64).view(2, 32)}
    assert scheduler.resize(batch)["input_ids"].tolist() == batch["input_ids"][:, :8].tolist()
    assert scheduler.resize(batch, mode="reshape")["input_ids"].shape == (8, 8)


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_resize_in_a_trace(tracing_mode, pre_dispatch):
    scheduler, ids = SequenceLengthScheduler(8, 32, duration=100), torch.arange(64).view(2, 32)
    trace = make_fx(
        lambda x: scheduler.resize({"input_ids": x, "labels": x})["labels"],
        tracing_mode=tracing_mode,
        pre_dispatch=pre_dispatch,
    )
    assert trace(ids)(ids + 1).equal(ids[:, :8] + 1)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"min_seq_length": 0}, ValueError, "min_seq_length must be at least 1, got 0"),
        ({"max_seq_length": 0}, ValueError, "max_seq_length must be at least 8, got 0"),
        (
            {"min_seq_length": 9, "max_seq_length": 8},
            ValueError,
            "max_seq_length must be at least 9, got 8",
        ),
        ({"max_seq_length": 10.0}, TypeError, "max_seq_length must be an int, got float"),
        ({"duration": -1}, ValueError, "duration must be 0 or .*, got -1"),
        ({"duration": float("inf")}, ValueError, "duration must be finite"),
        ({"duration": "30%"}, TypeError, "duration must be a real number, got str"),
        ({"duration": 0.3}, ValueError, "duration must be 0 or a number of steps from 1 to .*, got 0.3"),
        ({"duration": 0.5, "unit": "token"}, ValueError, "duration must be 0 or a number of tokens"),
        ({"step_size": 0}, ValueError, "step_size must be at least 1, got 0"),
        ({"unit": "epoch"}, ValueError, "unit must be one of step, token, sample, got 'epoch'"),
        ({"pacing": "quadratic"}, ValueError, "pacing must be 'linear', .* got 'quadratic'"),
        (
            {"pacing": discrete([(60, 8), (60, 16)])},
            ValueError,
            "duration must cover the stages of pacing, 120 units, got 100",
        ),
        ({"pacing": discrete([(10, 4)])}, ValueError, "stages must have lengths from 8 to 1024, got 4"),
        ({"pacing": root}, ValueError, "pacing must be .* got <class"),
        ({"duration": 2**53 + 1}, ValueError, r"duration must be .* to 2\*\*53, got 9007199254740993"),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        SequenceLengthScheduler(**{"duration": 100, **settings})


def test_bad_pacings():
    with pytest.raises(ValueError, match="degree must be positive, got 0"):
        root(0)
    with pytest.raises(TypeError, match="degree must be a real number"):
        root("2")
    with pytest.raises(ValueError, match="ratio must be above 1, got 1"):
        exponential(1)
    with pytest.raises(TypeError, match="ratio must be a real number"):
        exponential("2")
    with pytest.raises(ValueError, match="times must be at least 1, got 0"):
        doubling(0)
    with pytest.raises(ValueError, match="cycles must be at least 1, got 0"):
        cyclic("linear", 0)
    for name in ("times", "cycles", "draws"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            grow_p2(**{"times": 1, "cycles": 1, "draws": 1, name: 0})
    with pytest.raises(TypeError, match="seed must be an int, got float"):
        grow_p2(1, 1, 1, seed=0.5)
    with pytest.raises(ValueError, match=r"pacing must be 'linear', 'sine' .* got 'quadratic'"):
        cyclic("quadratic", 2)
    with pytest.raises(ValueError, match=r"pacing must be .* got <class"):
        cyclic(doubling, 2)
    with pytest.raises(ValueError, match=r"pacing must be .* got discrete\(\[\(8, 8\)\]\)"):
        cyclic(discrete([(8, 8)]), 2)
    with pytest.raises(ValueError, match="units must be at least 1, got 0"):
        discrete([(0, 8)])
    with pytest.raises(TypeError, match="length must be an int, got float"):
        discrete([(8, 8.5)])
    with pytest.raises(ValueError, match=r"stage lengths must not decrease, got \[64, 32\]"):
        discrete([(10, 64), (10, 32)])


class Lengths(torch.utils.data.Dataset):
    """Items that say what a worker knows of a schedule."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is None:
            length = self.scheduler.seq_length
        else:
            with pytest.raises(RuntimeError, match="not known in a DataLoader worker"):
                self.scheduler.resize({"input_ids": torch.zeros(1, 64)})
            length = 0
        return length, self.scheduler.seq_length_at(self.scheduler.progress)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_does_not_know_the_length(workers):
    """Its copy of the scheduler never advances, so batches would keep the first length without a word."""
    scheduler = SequenceLengthScheduler(8, 64, duration=10)
    scheduler.step(5)
    loader = torch.utils.data.DataLoader(Lengths(scheduler), num_workers=workers, batch_size=None)
    assert [tuple(item) for item in loader] == [(32 if workers == 0 else 0, 32)] * 2


def test_the_length_is_computed_when_the_progress_changes():
    calls = []

    def pacing(x):
        calls.append(x)
        return x

    scheduler = SequenceLengthScheduler(8, 64, duration=10, pacing=pacing)
    scheduler.step(5)
    assert [scheduler.seq_length for _ in range(3)] == [32] * 3
    assert calls == [0, Fraction(1, 2)]
