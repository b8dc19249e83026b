"""How tune_schedule judges the validations that a trial yields."""

import json
import math
import random

import numpy as np
import pytest
import torch

from seqwarm_kernels.tuning import Validation

from .test_tune_schedule import tune
from .toys import Formula


@pytest.mark.parametrize("perplexity", [math.inf, math.nan])
def test_a_perplexity_that_is_not_finite_fluctuates_and_is_valid_json(tmp_path, perplexity):
    def diverges(scheduler, end):
        yield Validation(0, 50.0)
        yield Validation(20, perplexity if scheduler.duration > 400 else 40.0)
        yield Validation(end, 30.0)

    found = tune(diverges, folder=tmp_path)
    assert found.duration == 400
    assert [trial.is_stable for trial in found.trials] == [trial.duration <= 400 for trial in found.trials]
    for file in tmp_path.glob("*.json"):
        json.loads(file.read_text(), parse_constant=pytest.fail)
    assert tune(pytest.fail, folder=tmp_path).table() == found.table()


def test_a_rise_is_relative_to_the_best_not_to_the_last():
    def creeps(scheduler, end):
        for progress, value in ((0, 10.0), (30, 12.0), (60, 14.0), (end, 10.0)):
            yield Validation(progress, value if scheduler.duration > 500 else 10.0)

    found = tune(creeps)
    assert found.duration == 500
    stopped = next(trial for trial in found.trials if trial.fluctuates)
    assert stopped.cost == 60
    assert stopped.rises == pytest.approx([1, 1.2, 1.4])


@pytest.mark.parametrize(
    ("validations", "subject"),
    [
        ([], "run_trial"),
        ([Validation(0, 9.0), Validation(119, 8.0)], "run_trial"),  # a trial ends at 120
        ([Validation(120, 9.0)], "run_trial"),  # one validation cannot show a fluctuation
        ([Validation(10, 9.0), Validation(9, 8.0)], "progress"),
        ([Validation(-1, 9.0)], "progress"),
        ([Validation(0, 0.7)], "perplexity"),  # a loss
    ],
)
def test_wrong_trials(tmp_path, validations, subject):
    for _ in range(2):
        with pytest.raises(ValueError, match=subject):
            tune(lambda scheduler, end: validations, folder=tmp_path)
    assert tune(Formula(lambda *_: True), folder=tmp_path).is_longest


def test_a_training_that_does_not_step_its_scheduler_is_stopped():
    def forgets(scheduler, end):
        for _ in range(1000):
            yield Validation(scheduler.progress, 9.0)
        pytest.fail("the trial was not stopped")

    with pytest.raises(ValueError, match="scheduler"):
        tune(forgets)


def test_numpy_and_torch_numbers_become_plain_numbers(tmp_path):
    def run_trial(scheduler, end):
        yield Validation(0, np.float32(9.5), torch.tensor(0))
        yield Validation(np.int64(end // 2), torch.tensor(9.25), np.int64(50))
        yield Validation(end, 9, 100)

    found = tune(run_trial, folder=tmp_path)
    assert found.accepted.validations == ((0, 9.5, 0), (60, 9.25, 50), (120, 9.0, 100))
    assert {type(value) for each in found.accepted.validations for value in each} == {int, float}
    assert tune(pytest.fail, folder=tmp_path) == found


def test_the_first_validation_past_the_end_is_the_last_that_counts():
    def run_trial(scheduler, end):
        yield Validation(0, 9.0)
        yield Validation(end - 1, 8.0)
        yield Validation(50 * end, 80.0 if scheduler.duration > 500 else 8.0)
        yield Validation(60 * end, 800.0)

    found = tune(run_trial)
    assert found.duration == 500
    assert found.accepted.cost == 50 * 120
    assert found.accepted.then(Validation(60 * 120, 800.0)) is found.accepted


def draw():
    return torch.rand(()).item(), random.random(), np.random.rand()


def test_every_random_stream_is_seeded_before_a_trial():
    streams = {0: [], 1: []}
    for seed, drawn in streams.items():
        draw()
        tune(lambda *_, to=drawn: to.append(draw()) or [Validation(0, 5.0), Validation(120, 4.0)], seed=seed)
    assert len(streams[0]) > 1
    assert [len(set(of_seed)) for of_seed in streams.values()] == [1, 1]
    assert all(one != other for one, other in zip(streams[0][0], streams[1][0], strict=True))


def test_the_callers_random_streams_are_restored_after_an_error():
    def draws(scheduler, end):
        draw()
        yield Validation(0, 5.0)
        raise KeyboardInterrupt

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = draw()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    with pytest.raises(KeyboardInterrupt):
        tune(draws)
    assert draw() == expected
