"""The command tune on the demo's GPT and on the user's own training."""

import json
import sys
from pathlib import Path

import pytest

from seqwarm_kernels import SequenceLengthScheduler, cli
from seqwarm_kernels.demo.settings import settings_for
from seqwarm_kernels.demo.text import read_corpus
from seqwarm_kernels.demo.training import DemoTrial, Trainer

TRIAL = """
from seqwarm_kernels.tuning import Validation

print("loading")

def run_trial(scheduler, end):
    jumps = scheduler.min_seq_length < 16 or scheduler.duration > 300
    yield Validation(0, 9.0)
    yield Validation(end // 2, 18.0 if jumps else 8.0)
    yield Validation(end, 7.0)

def hopeless(scheduler, end):
    yield Validation(0, float("nan"))

def stops(scheduler, end):
    yield Validation(0, 9.0)
    raise KeyboardInterrupt

def mistaken(scheduler, end):
    yield Validation(0, 9.0)
    open("no data")
"""

TINY = ("--device", "cpu", "--steps", 40, "--seq-length", 32, "--batch-size", 2, "--layers", 1, "--width", 16)
OWN = ("--seq-length", 64, "--learning-rate-warmup", 50, "--durations", 100, 200, 300, 400)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Returns the name of a module in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_training", raising=False)
    (tmp_path / "own_training.py").write_text(TRIAL)
    return "own_training"


def run(*options):
    return cli.main(["tune", *map(str, options)])


def test_the_users_own_training(own, capsys):
    pytest.importorskip("matplotlib")
    options = ("--trial", f"{own}:run_trial", *OWN, "--folder", "trials")
    assert run(*options, "--figure", "trials/tuning.svg", "--json") == 0
    printed = capsys.readouterr()
    assert printed.err == "loading\n"  # and no progress bar without a terminal
    found = json.loads(printed.out)
    assert (found["schedule"]["min_seq_length"], found["schedule"]["duration"]) == (16, 300)
    assert found["schedule"]["unit"] == "step"
    assert found["configuration"]["settings"] == {"trial": "own_training:run_trial"}
    assert json.loads(Path("trials/result.json").read_text()) == found
    assert Path("trials/tuning.svg").read_text().startswith("<?xml")
    page = Path("trials/tuning.md").read_text()
    for part in ("Found: min_seq_length 16, duration 300 steps", "](<tuning.svg>)", "| seed | 0 |", "torch 2"):
        assert part in page
    assert f"`seqwarm tune --trial {own}:run_trial --seq-length 64" in page
    assert page.count("fluctuates") == sum(trial["outcome"] == "fluctuates" for trial in found["trials"])
    assert run(*options) == 0
    assert "Found: min_seq_length 16, duration 300 steps" in capsys.readouterr().out


def test_the_options_of_the_search(own, capsys):
    options = ("--min-seq-lengths", 8, 24, "--step-size", 16, "--root", 2, "--multiples", 2, "--max-rise", 1.5)
    assert run("--trial", f"{own}:run_trial", *OWN, *options, "--unit", "token", "--seed", 7, "--json") == 0
    configuration = json.loads(capsys.readouterr().out)["configuration"]
    expected = {"max_seq_length": 64, "learning_rate_warmup": 50, "multiples": 2.0, "step_size": 16, "unit": "token"}
    expected |= {"min_seq_lengths": [8, 24], "durations": [100, 200, 300, 400]}
    expected |= {"pacing": "root(2.0)", "max_rise": 1.5, "seed": 7}
    assert {name: value for name, value in configuration.items() if name != "settings"} == expected


def test_nothing_stable_is_exit_status_1_with_the_table(own, capsys):
    pytest.importorskip("matplotlib")
    assert run("--trial", f"{own}:hopeless", *OWN, "--figure", "tuning.png") == 1
    assert "fluctuates" in capsys.readouterr().out
    assert Path("tuning.png").read_bytes().startswith(b"\x89PNG")
    assert "no candidate was stable" in Path("tuning.md").read_text()


def test_a_figure_that_cannot_be_written_is_seen_before_the_work(own, capsys):
    pytest.importorskip("matplotlib")
    Path("figures").touch()
    assert run("--trial", f"{own}:mistaken", *OWN, "--figure", "figures/tuning.png") == 2
    assert "figures" in capsys.readouterr().err


def test_ctrl_c_prints_how_to_continue(own, capsys):
    assert run("--trial", f"{own}:stops", *OWN) == 130
    assert "--folder" in capsys.readouterr().err
    assert run("--trial", f"{own}:stops", *OWN, "--folder", "trials") == 130
    assert "same command" in capsys.readouterr().err


@pytest.mark.parametrize("trial", ["own_training:mistaken", "broken:run_trial", "nowhere"])
def test_an_error_in_the_users_training_keeps_its_traceback(own, capsys, trial):
    Path("broken.py").write_text("open('no data')")
    assert run("--trial", trial, *OWN) == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert ("nowhere" if trial == "nowhere" else "'no data'") in printed


def test_the_demos_gpt(text_file, tmp_path, capsys, monkeypatch):
    options = (*TINY, "--text", text_file, "--folder", tmp_path / "trials", "--json")
    assert run(*options) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed)
    total = 40 * 2 * 32
    configuration = found["configuration"]
    assert (configuration["unit"], configuration["max_seq_length"]) == ("token", 32)
    assert configuration["min_seq_lengths"] == [8, 16]
    assert configuration["learning_rate_warmup"] == round(0.05 * total)
    assert configuration["durations"] == [total * percent // 100 for percent in range(15, 91, 5)]
    assert configuration["settings"].items() >= {"steps": 40, "batch_size": 2, "layers": 1, "width": 16}.items()
    assert found["tokens"] == found["cost"] > 0
    for trial in found["trials"]:
        assert trial["validations"][0]["progress"] == 0
        assert 200 < trial["validations"][0]["perplexity"] < 300  # of 256 bytes, before any training
    monkeypatch.setattr(Trainer, "_step", pytest.fail)
    assert run(*options) == 0
    assert capsys.readouterr().out == printed
    text_file.write_text(text_file.read_text() + "more")
    assert run(*options) == 2
    assert "text" in capsys.readouterr().err


def demo_trial(text_file):
    """A trial of 12 steps, and its tokens."""
    settings = settings_for("cpu", steps=12, seq_length=32, batch_size=2, layers=1, width=16)
    return DemoTrial(settings, read_corpus([str(text_file)], 32)), settings.total_tokens


def schedule():
    return SequenceLengthScheduler(8, 32, duration=300, unit="token")


def test_a_trial_trains_by_the_given_schedule(text_file):
    trial, total = demo_trial(text_file)
    scheduler = schedule()
    validations = list(trial(scheduler, total))
    assert scheduler.progress == total == validations[-1].progress
    assert [validation.progress for validation in validations[:2]] == [0, 64]  # four steps of 16 tokens
    assert validations[-1].perplexity < validations[0].perplexity
    assert list(trial(schedule(), total)) == validations


def test_a_loss_above_the_largest_float_is_an_infinite_perplexity(text_file, monkeypatch):
    monkeypatch.setattr(Trainer, "_evaluate", lambda trainer: 1000.0)
    trial, total = demo_trial(text_file)
    assert next(trial(schedule(), total)).perplexity == float("inf")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--trial", "own_training:run_trial", "--seq-length", 64], "--learning-rate-warmup"),
        (["--trial", "own_training:run_trial", *OWN, "--steps", 3], "steps"),
        (["--trial", "own_training:run_trial", *OWN, "--folder", "."], "folder"),  # it has other files
        ([*TINY, "--text", "own_training.py", "--multiples", 21], "multiples"),
        ([*TINY, "--text", "own_training.py", "--learning-rate-warmup", 50], "--learning-rate-warmup"),
    ],
)
def test_wrong_usage_is_one_line(own, capsys, options, name):
    assert run(*options) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert name in line
