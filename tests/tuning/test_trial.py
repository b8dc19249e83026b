"""How tune_schedule judges the validations that a trial yields."""

import json
import math

import numpy as np
import pytest
import torch

from seqwarm_kernels.diagnostics import Validation

from .test_tune_schedule import region, tune
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
    again = tune(diverges, folder=tmp_path)
    assert again.table() == found.table()


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
    ("validations", "error", "message"),
    [
        ([], ValueError, "must train and validate up to 120 steps, but its last validation was at 0"),
        ([Validation(0, 9.0), Validation(119, 8.0)], ValueError, "its last validation was at 119"),
        ([Validation(120, 9.0)], ValueError, "must validate at least twice"),
        ([Validation(10, 9.0), Validation(9, 8.0)], ValueError, "must rise .*got 9 after 10; was the scheduler"),
        ([Validation(0, 0.7)], ValueError, "perplexity of a Validation must be at least 1 .*got 0.7"),
        ([Validation(0.5, 7.0)], TypeError, "progress of a Validation must be an int, got float"),
        (None, TypeError, r"run_trial must yield, or return an iterable of, .*got NoneType"),
        ([None], TypeError, r"run_trial must yield Validation\(progress, perplexity\), got None"),
        ([Validation(0, None)], TypeError, "perplexity of a Validation must be a number, got None"),
        ([Validation(0, "9.0")], TypeError, "perplexity of a Validation must be a number, got '9.0'"),
        ([Validation(0, True)], TypeError, "perplexity of a Validation must be a number, got True"),
        ([Validation(0, torch.ones(2))], TypeError, "perplexity of a Validation must be a number, got tensor"),
        ([Validation(0, -math.inf)], ValueError, "perplexity of a Validation must be at least 1 .*got -inf"),
        ([Validation(-1, 7.0)], ValueError, "progress of a Validation must be at least 0, got -1"),
        ([Validation(True, 7.0)], TypeError, "progress of a Validation must be an int, got bool"),
        ([Validation(0, 7.0, "many")], TypeError, "tokens of a Validation must be an int, got str"),
        ([Validation(0, 7.0, -1)], ValueError, "tokens of a Validation must be at least 0, got -1"),
        ([Validation(0, 7.0, 9), Validation(1, 7.0, 8)], ValueError, "tokens .* must not fall, got 8 after 9"),
        ([(0, 7.0)], TypeError, r"run_trial must yield Validation\(progress, perplexity\), got \(0, 7.0\)"),
    ],
)
def test_wrong_trials(validations, error, message):
    with pytest.raises(error, match=message):
        tune(lambda scheduler, end: validations)


def test_a_training_that_does_not_step_its_scheduler_is_stopped(tmp_path):
    def forgets(scheduler, end):
        for _ in range(1000):
            yield Validation(scheduler.progress, 9.0)
        pytest.fail("the trial was not stopped")

    with pytest.raises(ValueError, match=r"progress .* must rise .*got 0 after 0; was the scheduler stepped"):
        tune(forgets, folder=tmp_path)


def test_a_trial_of_one_validation_is_refused_however_often_it_is_resumed(tmp_path):
    for _ in range(8):
        with pytest.raises(ValueError, match="must validate at least twice"):
            tune(lambda scheduler, end: [Validation(end, 9.0)], folder=tmp_path)
    with pytest.raises(ValueError, match="must validate at least twice"):
        tune(lambda scheduler, end: [Validation(end, 9.0), Validation(end + 1, 9.0)], folder=tmp_path)
    assert tune(Formula(region), folder=tmp_path).duration == 700


def test_numpy_and_torch_numbers_become_plain_numbers(tmp_path):
    def run_trial(scheduler, end):
        yield Validation(0, np.float32(9.5), torch.tensor(0))
        yield Validation(np.int64(end // 2), torch.tensor(9.25), np.int64(50))
        yield Validation(end, 10**400 if scheduler.duration > 400 else 9, 100)

    found = tune(run_trial, folder=tmp_path)
    assert found.duration == 400
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


def test_an_error_in_a_trial_closes_the_iterator_and_is_raised():
    toy = Formula(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tune(toy)
    assert toy.closed == [(8, 200)]
