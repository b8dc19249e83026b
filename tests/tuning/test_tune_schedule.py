"""tune_schedule on toy trainings with known stable candidates."""

import itertools
import json
import math
import os
import pickle
import random
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler, discrete, root
from seqwarm_kernels.diagnostics import NoStableSchedule, Validation, tune_schedule

from .toys import Formula, SummedLoss


def tune(run_trial, **options):
    defaults = {
        "max_seq_length": 256,
        "learning_rate_warmup": 40,
        "durations": range(200, 1001, 100),
        "progress": False,
    }
    return tune_schedule(run_trial, **{**defaults, **options})


def region(min_seq_length, duration):
    """Stable for minimum lengths from 32 on and durations up to 700 steps."""
    return min_seq_length >= 32 and duration <= 700


def grid_cost(found, total):
    """The cost of a run of `total` units for each pair of candidates."""
    return len(found.configuration.min_seq_lengths) * len(found.configuration.durations) * total


def test_smallest_length_and_largest_duration_of_a_known_region():
    toy = Formula(region)
    found = tune(toy)
    assert (found.min_seq_length, found.duration) == (32, 700)
    assert toy.asked == [(8, 200), (16, 200), (32, 200), (32, 600), (32, 800), (32, 700)]
    assert toy.closed == toy.asked
    assert [trial.is_stable for trial in found.trials] == [False, False, True, True, False, True]
    assert [trial.cost for trial in found.trials] == [60, 60, 120, 120, 60, 120]
    assert found.cost == 540
    assert found.tokens == 54_000
    assert grid_cost(found, 1000) == 5 * 9 * 1000
    assert found.cost < grid_cost(found, 1000) / 10
    assert not found.is_longest


def test_the_schedule_found():
    found = tune(Formula(region), step_size=16, pacing=root(2), unit="token", learning_rate_warmup=40)
    scheduler = found.scheduler()
    assert isinstance(scheduler, SequenceLengthScheduler)
    expected = SequenceLengthScheduler(32, 256, duration=700, step_size=16, pacing=root(2), unit="token")
    assert scheduler.state_dict() == expected.state_dict()
    scheduler.step(10)
    assert found.scheduler().progress == 0


def test_longer_durations_if_no_length_is_stable_at_the_shortest():
    found = tune(Formula(lambda length, duration: 500 <= duration <= 800))
    assert (found.min_seq_length, found.duration) == (8, 800)
    assert [trial.duration for trial in found.trials[:5]] == [200] * 5


def test_the_longest_candidate_says_so():
    found = tune(Formula(lambda length, duration: True))
    assert (found.min_seq_length, found.duration) == (8, 1000)
    assert found.is_longest
    assert "longer durations may be stable" in found.table()


def test_nothing_stable_is_an_error_with_the_trials():
    with pytest.raises(NoStableSchedule, match="no candidate was stable") as caught:
        tune(Formula(lambda length, duration: False))
    assert len(caught.value.trials) == 5 * 5  # durations 1, 2, 4, 8 and the last
    assert str(caught.value).count("fluctuates") == 25
    assert caught.value.to_json()["schedule"] is None
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.trials == caught.value.trials


@pytest.mark.parametrize(("max_rise", "longest"), [(1.5, 1000), (1.3, 700)])
def test_the_threshold(max_rise, longest):
    toy = Formula(lambda length, duration: duration <= 700, jump=1.4)
    assert tune(toy, max_rise=max_rise).duration == longest


class Closable:
    """An iterator that the test holds as well."""

    def __init__(self, end):
        self.validations, self.closed = iter([Validation(0, 9.0), Validation(end, 8.0)]), False

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.validations)

    def close(self):
        self.closed = True


def test_the_iterator_is_closed():
    made = []

    def run_trial(scheduler, end):
        made.append(Closable(end))
        return made[-1]

    tune(run_trial)
    assert made
    assert all(each.closed for each in made)


def test_same_seed_same_search_after_other_random_draws():
    def drawn(seed):
        torch.rand(3), random.random(), np.random.rand()
        return tune(Formula(region), seed=seed).to_json()["trials"]

    assert drawn(1) == drawn(1) != drawn(2)


def test_every_random_stream_is_seeded_before_a_trial():
    streams = []

    def run_trial(scheduler, end):
        streams.append((torch.rand(()).item(), random.random(), np.random.rand()))
        return [Validation(0, 5.0), Validation(end, 4.0)]

    tune(run_trial)
    assert len(streams) > 1
    assert len(set(streams)) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_random_streams_are_restored(fails):
    def draw():
        return torch.rand(()).item(), random.random(), np.random.rand()

    def draws(scheduler, end):
        draw()
        yield Validation(0, 5.0)
        if fails:
            raise KeyboardInterrupt
        yield Validation(end, 4.0)

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = draw()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        tune(draws)
    assert draw() == expected


def test_default_durations_are_multiples_of_a_trial():
    found = tune(Formula(lambda length, duration: True), durations=None, multiples=2.5)
    assert found.configuration.end == 100
    assert found.configuration.durations == tuple(range(100, 1601, 100))


def test_the_end_of_a_trial_is_exact():
    found = tune(Formula(lambda *_: True, every=5), multiples=2.2, learning_rate_warmup=25)
    assert found.configuration.end == 55, "as floats, 2.2 · 25 is above 55"


def test_lengths_that_are_not_below_the_full_one_are_left_out():
    assert tune(Formula(lambda *_: True), max_seq_length=32).configuration.min_seq_lengths == (8, 16)


@pytest.mark.slow
def test_a_small_transformer_that_full_length_makes_diverge():
    """At this learning rate, training diverges at the full length, or if the full length is reached early."""
    torch.set_num_threads(1)
    toy = SummedLoss()
    found = tune_schedule(
        toy,
        max_seq_length=toy.seq_length,
        learning_rate_warmup=toy.learning_rate_warmup,
        durations=range(30, 181, 10),
        progress=False,
    )
    assert found.cost < grid_cost(found, toy.steps) / 10

    def largest_rise(scheduler):
        perplexities = [validation.perplexity for validation in toy(scheduler, toy.steps)]
        return max(after / min(perplexities[: index + 1]) for index, after in enumerate(perplexities[1:]))

    assert largest_rise(SequenceLengthScheduler(max_seq_length=toy.seq_length, duration=0)) > 2
    assert largest_rise(found.scheduler()) < 1.3


class Recorded:
    """Trials that interrupt the search at the `stop`-th validation."""

    def __init__(self, stop=None):
        self.toy, self.left = Formula(region), stop

    def __call__(self, scheduler, end):
        for validation in self.toy(scheduler, end):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left = None if self.left is None else self.left - 1
            yield validation


@pytest.mark.parametrize("stop", [0, 1, 7, 12, 13, 14, 30, 44])
def test_an_interrupted_search_resumes_to_the_same_numbers(tmp_path, stop):
    uninterrupted = tune(Recorded(), folder=tmp_path / "uninterrupted")
    with pytest.raises(KeyboardInterrupt):
        tune(Recorded(stop), folder=tmp_path / "interrupted")
    assert not (tmp_path / "interrupted" / "result.json").exists()
    before = {file.name for file in (tmp_path / "interrupted").glob("trial_*") if "unfinished" not in file.read_text()}
    rest = Recorded()
    assert tune(rest, folder=tmp_path / "interrupted") == uninterrupted
    assert len(rest.toy.asked) == 6 - len(before), "finished trials are read, not run"
    for file in (tmp_path / "uninterrupted").iterdir():
        assert file.read_text() == (tmp_path / "interrupted" / file.name).read_text()


def test_a_finished_search_is_read(tmp_path):
    found = tune(Formula(region), folder=str(tmp_path))
    assert tune(Formula(pytest.fail), folder=tmp_path) == found
    assert json.loads((tmp_path / "result.json").read_text()) == found.to_json()
    assert found.to_json()["schedule"] == {
        "min_seq_length": 32,
        "max_seq_length": 256,
        "duration": 700,
        "step_size": 8,
        "pacing": "linear",
        "unit": "step",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rise": 1.2}, "max_rise is 1.3 in the state, 1.2 here"),
        ({"seed": 1}, "seed is 0 in the state, 1 here"),
        ({"durations": [200]}, r"durations is \[200, .* in the state, \[200\] here"),
        ({"pacing": root(2)}, r"pacing is 'linear' in the state, 'root\(2\)' here"),
        ({"settings": {"learning_rate": 2}}, r"settings\['learning_rate'\] is 1 in the state, 2 here"),
        ({"settings": {}}, r"settings\['learning_rate'\] is 1 in the state, unknown here"),
        ({"settings": {"learning_rate": 1, "rows": 2}}, r"settings\['rows'\] is unknown in the state, 2 here"),
        ({"settings": {"learning_rate": 1, "rows": None}}, r"settings\['rows'\] is unknown in the state, None here"),
    ],
)
def test_a_folder_of_another_configuration_is_refused_by_name(tmp_path, options, message):
    tune(Formula(region), folder=tmp_path, settings={"learning_rate": 1})
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    expected = rf"the search in folder {re.escape(str(tmp_path))} is of another configuration: {message}"
    with pytest.raises(ValueError, match=expected):
        tune(Formula(pytest.fail), **{"folder": tmp_path, "settings": {"learning_rate": 1}, **options})
    assert before == {file: file.read_bytes() for file in tmp_path.iterdir()}


def test_stored_settings_that_are_not_an_object_are_named(tmp_path):
    tune(Formula(region), folder=tmp_path)
    file = tmp_path / "configuration.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "settings": [1]}))
    with pytest.raises(ValueError, match=r"settings in .*configuration.json must be an object, got \[1\]"):
        tune(Formula(pytest.fail), folder=tmp_path)


def test_a_folder_refuses_a_lambda(tmp_path):
    pacing = lambda x: x  # noqa: E731
    with pytest.raises(ValueError, match="pacing must be a named function if folder is given, got a lambda"):
        tune(Formula(pytest.fail), folder=tmp_path / "new", pacing=pacing)
    assert not (tmp_path / "new").exists()
    assert tune(Formula(region), pacing=pacing).duration == 700


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="folder must be new, empty or the folder of an earlier search, got"):
        tune(Formula(pytest.fail), folder=tmp_path)


def test_a_partial_first_file_does_not_block_a_folder(tmp_path):
    (tmp_path / "configuration.json.partial").write_text("{")
    assert tune(Formula(region), folder=tmp_path).duration == 700


@pytest.mark.parametrize("call", [1, 2, 5, 11])
def test_a_resumed_search_removes_what_killed_ones_left(tmp_path, monkeypatch, call):
    """A kill while a file is written leaves a part of it. The files of others stay."""

    def kill(partial, path):
        if next(calls) == call:
            left.append(partial.read_bytes())
            raise KeyboardInterrupt
        replace(partial, path)

    replace, calls, left = os.replace, itertools.count(1), []
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        patch.setattr(Path, "unlink", lambda path, **_: None)
        with pytest.raises(KeyboardInterrupt):
            tune(Formula(region), folder=tmp_path)
    assert [path.read_bytes() for path in tmp_path.glob("*.partial")] == left != []
    (tmp_path / "download.partial").touch()
    assert tune(Formula(region), folder=tmp_path).duration == 700
    assert [path.name for path in tmp_path.glob("*.partial")] == ["download.partial"]


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"validations": [{"progress": 1}]}'])
def test_a_record_that_cannot_be_read_is_named(tmp_path, content):
    tune(Formula(region), folder=tmp_path)
    (tmp_path / "trial_min8_duration200.json").write_text(content)
    with pytest.raises(ValueError, match=r"trial_min8_duration200.json cannot be read"):
        tune(Formula(pytest.fail), folder=tmp_path)
    (tmp_path / "configuration.json").write_text(content)
    with pytest.raises(ValueError, match=r"configuration.json (cannot be read|must have the entries)"):
        tune(Formula(pytest.fail), folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_seq_length": 8}, ValueError, "min_seq_lengths must have a length below max_seq_length 8, got none"),
        ({"min_seq_lengths": 8}, TypeError, "min_seq_lengths must be an iterable of ints, got int"),
        ({"durations": 100}, TypeError, "durations must be an iterable of ints, got int"),
        ({"folder": 3}, TypeError, "folder must be a path, got int"),
        (
            {"multiples": 1e308},
            ValueError,
            r"multiples times learning_rate_warmup must be .*got 1e\+308 times 40",
        ),
        ({"max_seq_length": 64.0}, TypeError, "max_seq_length must be an int, got float"),
        ({"min_seq_lengths": []}, ValueError, "min_seq_lengths must be strictly increasing and not empty"),
        ({"min_seq_lengths": (16, 8)}, ValueError, r"must be strictly increasing and not empty, got \[16, 8\]"),
        ({"durations": [100, 100]}, ValueError, r"durations must be strictly increasing.*\[100, 100\]"),
        ({"durations": [0, 100]}, ValueError, "each of durations must be at least 1, got 0"),
        ({"durations": [1.5]}, TypeError, "each of durations must be an int, got float"),
        ({"learning_rate_warmup": 0}, ValueError, "learning_rate_warmup must be at least 1, got 0"),
        ({"multiples": 0}, ValueError, "multiples must be positive, got 0"),
        ({"max_rise": 1}, ValueError, "max_rise must be above 1, got 1"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": 2**32}, ValueError, "seed must be at most 4294967295"),
        ({"step_size": 0}, ValueError, "step_size must be at least 1, got 0"),
        ({"unit": "epoch"}, ValueError, "unit must be one of step, token, sample, got 'epoch'"),
        ({"pacing": discrete([(10, 8)])}, ValueError, "pacing must scale with the duration, got discrete"),
        ({"settings": {"model": object()}}, ValueError, "settings must be a mapping of plain JSON values"),
        ({"settings": {"rate": math.nan}}, ValueError, "settings must be a mapping of plain JSON values"),
        ({"progress": 1}, TypeError, "progress must be True or False, got 1"),
    ],
)
def test_wrong_arguments(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        tune(Formula(pytest.fail), **{"folder": tmp_path / "new", **options})
    assert not (tmp_path / "new").exists()


def test_run_trial_must_be_callable():
    with pytest.raises(TypeError, match="run_trial must be callable, got int"):
        tune(3)


def test_the_table():
    lines = tune(Formula(region)).table().splitlines()
    assert lines[0].split("  ")[-1] == "verdict"
    rows = [line.split() for line in lines[1:7]]
    assert [row[0] for row in rows] == ["8", "16", "32", "32", "32", "32"]
    assert [row[4:] for row in rows] == [
        ["fluctuates"], ["fluctuates"], ["stable"], ["stable"], ["fluctuates"], ["stable", "<-", "found"],
    ]  # fmt: skip
    assert "up to 120 steps (3 times the learning rate's warmup) no validation perplexity above 1.3 times" in lines[8]
    assert lines[9] == "Found: min_seq_length 32, duration 700 steps, in 6 trials of 540 steps in total."


def test_the_bar(capsys):
    tune(Formula(region), progress=True)
    printed = capsys.readouterr().err
    assert "trial 1: from 8 over 200" in printed
    assert "trial 6: from 32 over 700" in printed
    assert "perplexity" in printed
