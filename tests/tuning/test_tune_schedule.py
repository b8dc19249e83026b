"""tune_schedule on toy trainings with known stable candidates."""

import json
import math
import pickle

import pytest

from seqwarm_kernels import SequenceLengthScheduler, discrete, root
from seqwarm_kernels.tuning import NoStableSchedule, tune_schedule

from .toys import Formula


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


def test_smallest_length_and_largest_duration_of_a_known_region():
    toy, held = Formula(region), []  # an iterator that nobody holds closes itself
    found = tune(lambda *given: held.append(toy(*given)) or held[-1])
    assert (found.min_seq_length, found.duration) == (32, 700)
    assert toy.asked == [(8, 200), (16, 200), (32, 200), (32, 600), (32, 800), (32, 700)]
    assert toy.closed == toy.asked
    assert [trial.is_stable for trial in found.trials] == [False, False, True, True, False, True]
    assert [trial.cost for trial in found.trials] == [60, 60, 120, 120, 60, 120]
    assert found.cost == 540
    assert found.tokens == 54_000
    assert not found.is_longest


def test_the_schedule_found():
    found = tune(Formula(region), step_size=16, pacing=root(2), unit="token", learning_rate_warmup=40)
    scheduler = found.scheduler()
    assert isinstance(scheduler, SequenceLengthScheduler)
    expected = SequenceLengthScheduler(32, 256, duration=700, step_size=16, pacing=root(2), unit="token")
    assert scheduler.state_dict() == expected.state_dict()
    scheduler.step(10)
    assert found.scheduler().progress == 0


def test_other_regions():
    found = tune(Formula(lambda length, duration: 500 <= duration <= 800))
    assert (found.min_seq_length, found.duration) == (8, 800)
    found = tune(Formula(lambda length, duration: True))
    assert (found.min_seq_length, found.duration) == (8, 1000)
    assert found.is_longest
    assert "longer durations may be stable" in found.table()


def test_nothing_stable_is_an_error_with_the_trials():
    with pytest.raises(NoStableSchedule, match="no candidate was stable") as caught:
        tune(Formula(lambda length, duration: False))
    assert len(caught.value.search.trials) == 5 * 5  # durations 1, 2, 4, 8 and the last
    assert str(caught.value).count("fluctuates") == 25
    assert caught.value.search.to_json()["schedule"] is None
    assert pickle.loads(pickle.dumps(caught.value)).search == caught.value.search


@pytest.mark.parametrize(("max_rise", "longest"), [(1.5, 1000), (1.3, 700)])
def test_the_threshold(max_rise, longest):
    toy = Formula(lambda length, duration: duration <= 700, jump=1.4)
    assert tune(toy, max_rise=max_rise).duration == longest


def test_default_candidates():
    """Durations are multiples of a trial, whose end is exact, and lengths are below the full one."""
    found = tune(Formula(lambda *_: True), durations=None, multiples=2.5, max_seq_length=32)
    assert found.configuration.end == 100
    assert found.configuration.durations == tuple(range(100, 1601, 100))
    assert found.configuration.min_seq_lengths == (8, 16)
    found = tune(Formula(lambda *_: True, every=5), multiples=2.2, learning_rate_warmup=25)
    assert found.configuration.end == 55, "as floats, 2.2 · 25 is above 55"


@pytest.mark.parametrize("stop", [0, 13])
def test_an_interrupted_search_resumes_to_the_same_numbers(tmp_path, stop):
    left = iter(range(stop))

    def run_trial(scheduler, end):
        for validation in Formula(region)(scheduler, end):
            if next(left, None) is None:
                raise KeyboardInterrupt
            yield validation

    uninterrupted = tune(Formula(region), folder=tmp_path / "uninterrupted")
    interrupted = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        tune(run_trial, folder=interrupted)
    finished = list(interrupted.glob("trial_*"))
    for name in ("trial_min8_duration200.json", "result.json"):  # as a kill leaves them
        (interrupted / f"{name}.0123456789abcdef.partial").write_text("{")
    rest = Formula(region)
    assert tune(rest, folder=interrupted) == uninterrupted
    assert len(rest.asked) == 6 - len(finished), "finished trials are read, not run"
    assert {file.name: file.read_text() for file in interrupted.iterdir()} == {
        file.name: file.read_text() for file in (tmp_path / "uninterrupted").iterdir()
    }


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
    ("options", "name"),
    [
        ({"max_rise": 1.2}, "max_rise"),
        ({"pacing": root(2)}, "pacing"),
        ({"settings": {"learning_rate": 2}}, "learning_rate"),
        ({"settings": {"learning_rate": 1, "rows": None}}, "rows"),
    ],
)
def test_a_folder_of_another_configuration_is_refused_by_name(tmp_path, options, name):
    tune(Formula(region), folder=tmp_path, settings={"learning_rate": 1})
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=name):
        tune(Formula(pytest.fail), **{"folder": tmp_path, "settings": {"learning_rate": 1}, **options})
    assert before == {file: file.read_bytes() for file in tmp_path.iterdir()}


def test_a_folder_refuses_a_lambda(tmp_path):
    pacing = lambda x: x  # noqa: E731
    with pytest.raises(ValueError, match="lambda"):
        tune(Formula(pytest.fail), folder=tmp_path / "new", pacing=pacing)
    assert tune(Formula(region), pacing=pacing).duration == 700


def test_a_folder_with_other_files_is_refused_and_keeps_them(tmp_path):
    (tmp_path / "thesis.tex.partial").touch()
    with pytest.raises(ValueError, match="folder"):
        tune(Formula(pytest.fail), folder=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex.partial"]
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "configuration.json.0123456789abcdef.partial").write_text("{")  # its own first file
    assert tune(Formula(region), folder=tmp_path / "killed").duration == 700


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trial_min8_duration200.json", "{"),
        ("trial_min8_duration200.json", '{"validations": [{"progress": 1}]}'),
        ("configuration.json", "[]"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content):
    tune(Formula(region), folder=tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=str(tmp_path)):
        tune(Formula(pytest.fail), folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_seq_length": 8}, "min_seq_lengths"),  # none is shorter
        ({"min_seq_lengths": []}, "min_seq_lengths"),
        ({"durations": [100, 100]}, "durations"),
        ({"multiples": 0}, "multiples"),
        ({"max_rise": 1}, "max_rise"),
        ({"max_rise": math.nan}, "max_rise"),
        ({"unit": "epoch"}, "unit"),
        ({"pacing": discrete([(10, 8)])}, "pacing"),
        ({"settings": {"rate": math.nan}}, "JSON"),
    ],
)
def test_arguments_are_checked_before_the_first_trial(options, name):
    with pytest.raises(ValueError, match=name):
        tune(pytest.fail, **options)
