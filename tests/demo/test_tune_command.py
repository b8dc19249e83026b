"""The command tune on the demo's GPT and on the user's own training."""

import json
import sys
from pathlib import Path

import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler, cli
from seqwarm_kernels.demo import tuning_trial as tuning
from seqwarm_kernels.demo.text import read_corpus
from seqwarm_kernels.demo.training import Trainer
from seqwarm_kernels.demo.tuning_trial import DemoTrial, demo_settings, perplexity

from ..support.pages import check_page

TRIAL = """
from seqwarm_kernels.diagnostics import Validation

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
    mistake()

def mistaken_at_once(scheduler, end):
    mistake()

def mistake():
    raise TypeError("not one number but two")

def nothing(scheduler, end):
    pass

def takes_the_folder_away(scheduler, end):
    import shutil
    shutil.rmtree("figures", ignore_errors=True)
    yield Validation(0, float("nan"))

no_function = 3
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


def fails(capsys, *options, status=2):
    """Returns the only line that is printed."""
    assert run(*options) == status
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("seqwarm tune: error: ")
    return line


def test_the_users_own_training(own, capsys):
    assert run("--trial", f"{own}:run_trial", *OWN, "--folder", "trials", "--figure", "tuning.png", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schedule"]["min_seq_length"] == 16
    assert found["schedule"]["duration"] == 300
    assert found["schedule"]["unit"] == "step"
    assert found["configuration"]["settings"] == {"trial": "own_training:run_trial"}
    assert json.loads(Path("trials/result.json").read_text()) == found
    assert Path("tuning.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_is_printed(own, capsys):
    assert run("--trial", f"{own}:run_trial", *OWN) == 0
    assert "Found: min_seq_length 16, duration 300 steps" in capsys.readouterr().out


def test_the_options_of_the_search(own, capsys):
    options = ("--min-seq-lengths", 8, 24, "--step-size", 16, "--root", 2, "--multiples", 2, "--max-rise", 1.5)
    assert run("--trial", f"{own}:run_trial", *OWN, *options, "--unit", "token", "--seed", 7, "--json") == 0
    configuration = json.loads(capsys.readouterr().out)["configuration"]
    del configuration["settings"]
    assert configuration == {
        "max_seq_length": 64,
        "min_seq_lengths": [8, 24],
        "durations": [100, 200, 300, 400],
        "learning_rate_warmup": 50,
        "multiples": 2.0,
        "step_size": 16,
        "unit": "token",
        "pacing": "root(2.0)",
        "max_rise": 1.5,
        "seed": 7,
    }


def test_nothing_stable_is_exit_status_1_with_the_table(own, capsys):
    assert run("--trial", f"{own}:hopeless", *OWN, "--figure", "tuning.png") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "seqwarm tune: error: no candidate was stable" in printed.err
    assert "fluctuates" in printed.err
    assert Path("tuning.png").read_bytes().startswith(b"\x89PNG")
    assert run("--trial", f"{own}:hopeless", *OWN, "--json") == 1
    assert json.loads(capsys.readouterr().out)["schedule"] is None


def test_ctrl_c_prints_how_to_continue(own, capsys):
    assert run("--trial", f"{own}:stops", *OWN) == 130
    assert "With --folder, a search can continue." in capsys.readouterr().err
    assert run("--trial", f"{own}:stops", *OWN, "--folder", "trials") == 130
    assert "The same command continues it." in capsys.readouterr().err


@pytest.mark.parametrize("function", ["mistaken", "mistaken_at_once"])
def test_an_error_in_the_users_training_keeps_its_traceback(own, capsys, function):
    assert run("--trial", f"{own}:{function}", *OWN) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "seqwarm tune: error: the training raised TypeError: not one number but two"
    assert any("own_training.py" in line and "in mistake" in line for line in lines)


def test_an_error_in_the_users_module_keeps_its_traceback(own, capsys):
    Path(f"{own}.py").write_text("import nowhere_to_be_found")
    assert run("--trial", f"{own}:run_trial", *OWN) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].endswith("the training raised ModuleNotFoundError: No module named 'nowhere_to_be_found'")
    assert any("own_training.py" in line for line in lines)


def test_a_training_that_yields_nothing_is_one_line(own, capsys):
    assert run("--trial", f"{own}:nothing", *OWN) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "seqwarm tune: error: run_trial must yield, or return an iterable of," in line


def test_a_figure_that_cannot_be_written_if_nothing_is_stable(own, capsys):
    Path("figures").mkdir()
    assert run("--trial", f"{own}:takes_the_folder_away", *OWN, "--figure", "figures/tuning.png") == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert "figures/tuning.png" in printed.splitlines()[-1]


def test_a_figure_in_the_folder_of_the_records(own, capsys):
    options = ("--folder", "trials", "--figure", "trials/tuning.png")
    assert run("--trial", f"{own}:run_trial", *OWN, *options) == 0
    assert Path("trials/tuning.png").exists()


def test_a_run_of_one_step(text_file, capsys):
    tiny = ("--device", "cpu", "--steps", 1, "--seq-length", 16, "--batch-size", 1, "--layers", 1, "--width", 16)
    assert run(*tiny, "--text", text_file, "--json") == 0
    durations = json.loads(capsys.readouterr().out)["configuration"]["durations"]
    assert durations == sorted({16 * percent // 100 for percent in range(15, 91, 5)})


def test_the_demos_gpt(text_file, tmp_path, capsys, monkeypatch):
    options = (*TINY, "--text", text_file, "--folder", tmp_path / "trials", "--validations", 4, "--json")
    assert run(*options) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed)
    total = 40 * 2 * 32
    configuration = found["configuration"]
    assert configuration["unit"] == "token"
    assert configuration["max_seq_length"] == 32
    assert configuration["min_seq_lengths"] == [8, 16]
    assert configuration["learning_rate_warmup"] == round(0.05 * total)
    assert configuration["durations"] == [total * percent // 100 for percent in range(15, 91, 5)]
    assert configuration["settings"]["peak_learning_rate"] == 4e-3
    assert found["tokens"] == found["cost"] > 0
    for trial in found["trials"]:
        assert len(trial["validations"]) >= 4
        assert trial["validations"][0]["progress"] == 0
        assert 200 < trial["validations"][0]["perplexity"] < 300  # of 256 bytes, before any training
    monkeypatch.setattr(Trainer, "_step", pytest.fail)
    assert run(*options) == 0
    assert capsys.readouterr().out == printed


def test_options_of_the_demos_gpt(text_file, tmp_path, capsys, monkeypatch):
    made = []
    monkeypatch.setattr(tuning, "Trainer", lambda run, settings, corpus: made.append(settings) or 1 / 0)
    assert run(*TINY, "--text", text_file, "--learning-rate", 0.1, "--seed", 3, "--validations", 5) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    [settings] = made
    names = ("steps", "seq_length", "batch_size", "layers", "width", "peak_learning_rate", "seed", "device")
    assert [getattr(settings, name) for name in names] == [40, 32, 2, 1, 16, 0.1, 3, "cpu"]
    assert settings.evaluations == 5 / 0.15 // 1 + 1


def test_a_trial_trains_by_the_given_schedule(text_file):
    settings = demo_settings(
        device="cpu",
        steps=12,
        seq_length=32,
        seed=0,
        text=[str(text_file)],
        learning_rate=None,
        batch_size=2,
        layers=1,
        width=16,
    )
    trial = DemoTrial(settings, read_corpus(settings.text, 32), 8)
    scheduler = SequenceLengthScheduler(8, 32, duration=300, unit="token")
    validations = list(trial(scheduler, settings.total_tokens))
    assert scheduler.progress == settings.total_tokens == validations[-1].progress
    assert [validation.progress for validation in validations[:2]] == [0, 96]  # six steps of 16 tokens
    assert validations[-1].perplexity < validations[0].perplexity
    torch.manual_seed(5)
    assert list(trial(SequenceLengthScheduler(8, 32, duration=300, unit="token"), settings.total_tokens)) == validations


def test_a_loss_above_the_largest_float_is_an_infinite_perplexity():
    assert perplexity(0.0) == 1
    assert perplexity(1000.0) == float("inf")


def test_another_text_is_another_configuration(text_file, tmp_path, capsys):
    options = (*TINY, "--text", text_file, "--folder", tmp_path / "trials", "--validations", 2)
    assert run(*options) == 0
    capsys.readouterr()
    text_file.write_text(text_file.read_text() + "more")
    assert "settings['text_sha256'] is" in fails(capsys, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trial", "own_training", *OWN], "--trial must be MODULE:FUNCTION, got own_training"),
        (["--trial", ".own_training:run_trial", *OWN], "--trial must be MODULE:FUNCTION, got .own_training:run_trial"),
        (["--trial", "own_training:nowhere", *OWN], "--trial must name a function, got own_training:nowhere"),
        (["--trial", "own_training:no_function", *OWN], "--trial must name a function, got own_training:no_function"),
        (["--trial", "own_training:run_trial", *OWN, "--multiples", 1e308], "--multiples times --learning-rate-warmup"),
        (["--trial", "own_training:run_trial", *OWN, "--figure", "."], "--figure must be a file, got the folder ."),
        (
            ["--trial", "own_training:run_trial", *OWN, "--figure", "nowhere/tuning.png"],
            "--figure must be in an existing folder with write permission, got nowhere/tuning.png",
        ),
        ([*TINY, "--multiples", 21], "--multiples must keep a trial within the run's 2,560 tokens, got 21 times"),
        (["--trial", "own_training:run_trial", "--seq-length", 64], "--trial needs --learning-rate-warmup"),
        (["--trial", "own_training:run_trial"], "--trial needs --seq-length"),
        (
            ["--trial", "own_training:run_trial", *OWN, "--steps", 3],
            "--steps belongs to the demo's GPT, not to --trial",
        ),
        (["--trial", "own_training:run_trial", *OWN, "--max-rise", 1], "--max-rise must be above 1"),
        (["--unit", "step"], "--unit belongs to --trial"),
        (["--text", "nowhere.txt"], "no such file or folder: nowhere.txt"),
        (["--device", "tpu"], "--device must be cpu, cuda or cuda:INDEX, got tpu"),
        (["--layers", 0], "--layers must be at least 1, got 0"),
        (["--width", 130], "--width must be a multiple of the 4 heads, got 130"),
        (["--learning-rate", 0], "--learning-rate must be positive, got 0"),
        (["--learning-rate", "nan"], "--learning-rate must be finite, got nan"),
        (["--text", "own_training.py", *TINY, "--validations", 0], "validations must be at least 1, got 0"),
    ],
)
def test_errors_of_the_user(own, capsys, options, message):
    assert message in fails(capsys, *options)


def test_a_module_that_does_not_exist(own, capsys):
    line = fails(capsys, "--trial", "nowhere_to_be_found:run", *OWN, status=1)
    assert "No module named 'nowhere_to_be_found'" in line


@pytest.mark.parametrize("package", ["matplotlib", "plotly"])
def test_a_figure_needs_packages(own, capsys, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    line = fails(capsys, "--trial", f"{own}:run_trial", *OWN, "--figure", "tuning.png", status=1)
    assert f"need {package}: pip install" in line


def test_the_page_has_the_trials_and_how_it_was_made(own, capsys):
    pytest.importorskip("plotly")
    options = ("--trial", f"{own}:run_trial", *OWN, "--seed", 7, "--figure", "tuning.png")
    assert run(*options, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    page = check_page(Path("tuning.html"))
    rises, perplexities, schedules = map(page.traces, range(3))
    assert rises.pop("limit") == [(0, 1.3), (150, 1.3)]
    for trial, *traces in zip(found["trials"], rises.items(), perplexities.items(), schedules.items(), strict=True):
        (name, rise), (_, perplexity), (_, schedule) = traces
        verdict = "found" if trial["duration"] == 300 and trial["min_seq_length"] == 16 else trial["outcome"]
        assert name == f"from {trial['min_seq_length']} over {trial['duration']}: {verdict}"
        assert perplexity == [(each["progress"], each["perplexity"]) for each in trial["validations"]]
        assert max(value for _, value in rise) == trial["largest_rise"]
        scheduler = SequenceLengthScheduler(trial["min_seq_length"], 64, duration=trial["duration"])
        assert schedule == [*scheduler.milestones(), (420, 64)]
    assert "Found: min_seq_length 16, duration 300 steps" in page.text
    assert "seed\n7\n" in page.text
    assert f"torch {torch.__version__}" in page.text
    assert f"command\nseqwarm tune --trial {own}:run_trial --seq-length 64" in page.text


def test_the_page_if_nothing_is_stable(own, capsys):
    pytest.importorskip("plotly")
    assert run("--trial", f"{own}:hopeless", *OWN, "--figure", "tuning.png") == 1
    page = check_page(Path("tuning.html"))
    assert "no candidate was stable" in page.text
    assert next(iter(page.traces(1).values())) == [(0, None)]


def test_a_training_that_prints_does_not_disturb_json(own, capsys):
    Path(f"{own}.py").write_text("print('loading')\n" + TRIAL)
    assert run("--trial", f"{own}:run_trial", *OWN, "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["schedule"]["duration"] == 300
    assert printed.err == "loading\n"  # and no progress bar without a terminal
