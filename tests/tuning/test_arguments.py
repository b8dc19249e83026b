"""Each argument of the tuning replaced by values that make no sense: accepted, or refused by its name."""

import json
from contextlib import suppress

import numpy as np
import pytest

from seqwarm_kernels.diagnostics import Trial, Validation, tune_schedule

from ..support.arguments import check_accepted_or_named
from .test_tune_schedule import region
from .toys import Formula

ARGUMENTS = {
    "max_seq_length": 64,
    "learning_rate_warmup": 40,
    "min_seq_lengths": (8, 16, 32),
    "durations": range(100, 900, 100),
    "multiples": 3,
    "max_rise": 1.3,
    "step_size": 8,
    "unit": "step",
    "pacing": "linear",
    "seed": 0,
    "settings": {},
    "folder": None,
    "progress": False,
}


class Started(Exception):
    """All arguments were accepted."""


def started(scheduler, end):
    raise Started


@pytest.mark.parametrize("name", ["run_trial", *ARGUMENTS])
def test_an_argument_is_accepted_or_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(value):
        with suppress(Started):
            tune_schedule(**{"run_trial": started, **ARGUMENTS, name: value})

    check_accepted_or_named(name, call)


@pytest.mark.parametrize("name", ["settings", "min_seq_lengths", "durations"])
@pytest.mark.parametrize("value", [b"\x08\x10", "x", 0])
def test_values_that_only_look_like_collections(name, value):
    with pytest.raises(TypeError, match=f"{name} must be"):
        tune_schedule(started, **{**ARGUMENTS, name: value})


@pytest.mark.parametrize("name", ["min_seq_length", "duration", "end", "max_rise", "validations"])
def test_numbers_of_a_trial(name):
    arguments = {"min_seq_length": 8, "duration": 100, "end": 50, "max_rise": 1.3, "validations": ()}
    check_accepted_or_named(name, lambda value: Trial(**{**arguments, name: value}))
    with pytest.raises((TypeError, ValueError), match=name):
        Trial(**{**arguments, name: -1})


@pytest.mark.parametrize("name", ["progress", "perplexity", "tokens"])
def test_numbers_of_a_validation(name):
    trial, numbers = Trial(8, 100, 50, 1.3), {"progress": 1, "perplexity": 2.0, "tokens": 3}
    check_accepted_or_named(name, lambda value: trial.then(Validation(**{**numbers, name: value})))


def test_numbers_of_numpy_are_kept_as_plain_numbers(tmp_path):
    numbers = {
        "max_seq_length": np.int64(64),
        "learning_rate_warmup": np.int32(40),
        "min_seq_lengths": np.array([8, 16, 32]),
        "durations": np.arange(100, 900, 100),
        "multiples": np.float32(3),
        "max_rise": np.float64(1.3),
        "step_size": np.int64(8),
        "seed": np.uint8(0),
    }
    found = tune_schedule(Formula(region), **{**ARGUMENTS, **numbers, "folder": tmp_path})
    assert found.to_json() == tune_schedule(Formula(region), **ARGUMENTS).to_json()
    json.dumps(found.to_json())


@pytest.mark.parametrize("path", [b"a.png", 3, None])
def test_the_path_of_a_figure(path):
    found = tune_schedule(Formula(region), **ARGUMENTS)
    with pytest.raises(TypeError, match="path must be a path, got"):
        found.figure(path)
