import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import seqwarm_kernels
from seqwarm_kernels.demo.report_folder import ReportFolder
from seqwarm_kernels.demo.training import Trainer, make_scheduler
from seqwarm_kernels.utils.files import partial_of

from ..support.pages import check_page
from ..support.tiers import first_fast

pytest.importorskip("matplotlib")
pytest.importorskip("plotly")

RUN = "import sys; from seqwarm_kernels.cli import main; sys.exit(main(['demo', *sys.argv[1:]]))"


def tiny(text, report):
    return [
        "--device",
        "cpu",
        "--quick",
        "--steps",
        4,
        "--seq-length",
        24,
        "--text",
        text,
        "--report",
        report,
    ]


def metrics(report):
    return [json.loads(line) for line in (Path(report) / "metrics.jsonl").read_text().splitlines()]


def without_seconds(records):
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def stop_at_step(monkeypatch, last, error):
    """Raises `error` in the step after `last` steps, counted over both runs."""
    step, taken = Trainer._step, []

    def stopping(trainer):
        taken.append(None)
        if len(taken) > last:
            raise error
        return step(trainer)

    monkeypatch.setattr(Trainer, "_step", stopping)


def test_a_whole_run(drawing_demo, text_file, capsys):
    assert drawing_demo(*tiny(text_file, "out")) == 0
    assert {path.name for path in Path("out").iterdir()} == {
        "checkpoint.pt",
        "metrics.jsonl",
        "report.html",
        "sequence_length.png",
        "settings.json",
        "summary.md",
        "validation_loss.png",
    }
    records = metrics("out")
    assert [record["run"] for record in records] == ["baseline"] * 5 + ["warmup"] * 5
    assert records[4]["tokens"] == records[9]["tokens"] == 4 * 8 * 24
    assert records[0]["validation_loss"] == records[5]["validation_loss"]
    assert list(records[0]) == [
        "run", "step", "tokens", "seconds", "seq_length", "learning_rate", "train_loss", "validation_loss",
    ]  # fmt: skip
    printed = capsys.readouterr()
    assert "warmup_allocator" in printed.out
    assert "the baseline's final validation loss" in printed.out
    assert printed.err == ""  # no progress bar without a terminal
    assert Path("out/validation_loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_has_result_settings_and_explanations(demo, text_file):
    demo(*tiny(text_file, "out"))
    summary = Path("out/summary.md").read_text()
    final = f"{metrics('out')[4]['validation_loss']:.4f}"
    for part in (
        f"final validation loss of {final}",
        "](validation_loss.png)",
        "| sequence-length warmup |",
        "## How to read it",
        "learning rate follows tokens, not steps",
        "Seconds are those of training only",
        "8 to 24 in steps of 8, over 30% of the tokens",
        str(text_file),
        "torch 2",
    ):
        assert part in summary


def test_page_and_json_have_the_records(demo, text_file, capsys):
    assert demo(*tiny(text_file, "out"), "--seed", 3) == 0
    page = check_page(Path("out/report.html"))
    records = metrics("out")
    names = {"baseline": "full length throughout", "warmup": "sequence-length warmup"}
    by_seconds, by_tokens, schedule, speeds = map(page.traces, range(4))
    for run, name in names.items():
        own = [record for record in records if record["run"] == run]
        assert by_seconds[name] == [(record["seconds"], record["validation_loss"]) for record in own]
        assert by_tokens[name] == [(record["tokens"], record["validation_loss"]) for record in own]
        assert speeds[name] == [
            (after["seq_length"], (after["tokens"] - before["tokens"]) / (after["seconds"] - before["seconds"]))
            for before, after in pairwise(own)
        ]
    settings = ReportFolder(Path("out")).settings()
    milestones = make_scheduler("warmup", settings).milestones()
    assert schedule[names["warmup"]] == [*milestones, (settings.total_tokens, 24)]
    assert schedule[names["baseline"]] == [(0, 24), (settings.total_tokens, 24)]
    assert "Sequence-length warmup " in page.text
    assert f"{records[4]['validation_loss']:.4f}" in page.text
    assert "seed\n3\n" in page.text
    assert f"torch {torch.__version__}" in page.text
    command = page.text.partition("command\n")[2].splitlines()[0]
    assert command.startswith("seqwarm demo --device cpu --quick")
    assert command.endswith("--report out --seed 3")

    capsys.readouterr()
    content = Path("out/report.html").read_text()
    assert demo("--resume", "out", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["records"] == records
    assert result["target_loss"] == records[4]["validation_loss"]
    assert result["settings"]["seed"] == 3
    assert Path("out/report.html").read_text() == content  # with the command that started the run


def test_the_default_folder_is_named_after_the_time(demo, text_file):
    assert demo(*tiny(text_file, "out")[:-2]) == 0
    [folder] = Path("reports").iterdir()
    assert folder.name.startswith("demo-2")


@pytest.mark.parametrize("steps_before", first_fast([3, 0, 1, 7]))
def test_a_resumed_run_equals_an_uninterrupted_one(demo, text_file, monkeypatch, steps_before):
    demo(*tiny(text_file, "uninterrupted"))
    with monkeypatch.context() as patch:
        stop_at_step(patch, steps_before, RuntimeError("power cut"))
        with pytest.raises(RuntimeError, match="power cut"):
            demo(*tiny(text_file, "stopped"))
    assert demo("--resume", "stopped") == 0
    assert without_seconds(metrics("stopped")) == without_seconds(metrics("uninterrupted"))


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_numbers(demo, text_file, tmp_path):
    demo(*tiny(text_file, "uninterrupted"))
    options = [str(option) for option in tiny(text_file, "killed")]
    environment = {**os.environ, "PYTHONPATH": str(Path(seqwarm_kernels.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *options],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wanted = random.randint(1, 9)
    path = Path("killed/metrics.jsonl")
    while process.poll() is None and not (path.exists() and len(metrics("killed")) >= wanted):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert demo("--resume", "killed") == 0
    assert without_seconds(metrics("killed")) == without_seconds(metrics("uninterrupted")), f"killed at {wanted}"


def test_metrics_that_are_behind_the_checkpoint_are_rewritten(demo, text_file, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at_step(patch, 2, RuntimeError("power cut"))
        with pytest.raises(RuntimeError, match="power cut"):
            demo(*tiny(text_file, "out"))
    lines = Path("out/metrics.jsonl").read_text()
    Path("out/metrics.jsonl").write_text("")
    assert demo("--resume", "out") == 0
    assert Path("out/metrics.jsonl").read_text().startswith(lines)


def test_ctrl_c_prints_how_to_resume_and_resume_takes_the_newest_run(demo, text_file, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_at_step(patch, 5, KeyboardInterrupt())
        assert demo(*tiny(text_file, "reports/mine")) == 130
    assert "demo --resume reports/mine" in capsys.readouterr().err
    assert demo("--resume") == 0
    assert Path("reports/mine/summary.md").exists()


def test_resuming_a_finished_run_writes_its_report_again(demo, text_file, monkeypatch):
    demo(*tiny(text_file, "out"))
    summary = Path("out/summary.md").read_text()
    Path("out/summary.md").unlink()
    stop_at_step(monkeypatch, 0, AssertionError("nothing is left to train"))
    assert demo("--report", "out", "--resume") == 0
    assert Path("out/summary.md").read_text() == summary


def fails(demo, capsys, *options, status=2):
    """Returns the only line that is printed."""
    assert demo(*options) == status
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("seqwarm demo: error: ")
    return line


def test_a_run_is_never_overwritten(demo, text_file, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at_step(patch, 1, KeyboardInterrupt())
        demo(*tiny(text_file, "out"))
    capsys.readouterr()
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    assert "out contains a run already: continue it with --resume out" in fails(demo, capsys, *tiny(text_file, "out"))
    assert before == {path: path.read_bytes() for path in Path("out").iterdir()}


def test_a_folder_with_other_files_raises(demo, text_file, capsys):
    Path("mine").mkdir()
    Path("mine/thesis.tex").touch()
    assert "--report must name a new or empty folder, got mine" in fails(demo, capsys, *tiny(text_file, "mine"))


def test_a_folder_with_a_partial_file_is_accepted(demo, text_file):
    Path("out").mkdir()
    Path("out/settings.json.partial").write_text("{")
    assert demo(*tiny(text_file, "out")) == 0


def test_a_resumed_run_removes_what_killed_ones_left(demo, text_file, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at_step(patch, 1, KeyboardInterrupt())
        demo(*tiny(text_file, "out"))
    partial_of(Path("out/checkpoint.pt")).write_text("a part")
    assert demo("--resume", "out") == 0
    assert not list(Path("out").glob("*.partial"))


def test_options_must_agree_with_a_resumed_run(demo, text_file, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at_step(patch, 1, KeyboardInterrupt())
        demo(*tiny(text_file, "out"))
    capsys.readouterr()
    line = fails(demo, capsys, "--resume", "out", "--seq-length", 32)
    assert "--seq-length is 24 in the run in out, got 32" in line
    assert "--report other name two folders" in fails(demo, capsys, "--resume", "out", "--report", "other")
    text_file.write_text(text_file.read_text() + "more")
    assert "the text has changed" in fails(demo, capsys, "--resume", "out")
    Path("out/settings.json").write_text("{}")
    assert "settings.json cannot be read" in fails(demo, capsys, "--resume", "out")


def test_agreeing_options_may_be_repeated(demo, text_file, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at_step(patch, 1, KeyboardInterrupt())
        demo(*tiny(text_file, "out"))
    assert demo(*tiny(text_file, "out"), "--resume") == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", 0], "--steps must be at least 1, got 0"),
        (["--seq-length", 8], "--seq-length must be at least 16, got 8"),
        (["--device", "tpu"], "--device must be cpu, cuda or cuda:INDEX, got tpu"),
        (["--device", "cuda:99"], "--device cuda:99 does not exist"),
        (["--text", "nowhere.txt"], "no such file or folder"),
        (["--resume", "nowhere"], "nowhere has no run to resume"),
        (["--resume"], "there is no unfinished run in reports/"),
    ],
)
def test_errors_are_one_line(demo, capsys, options, message):
    assert message in fails(demo, capsys, *options)
    assert not Path("reports").exists()


@pytest.mark.parametrize("package", ["matplotlib", "plotly"])
def test_a_missing_package_is_named_before_training(demo, text_file, capsys, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert 'pip install "seqwarm_kernels[demo]"' in fails(demo, capsys, *tiny(text_file, "out"), status=1)
    assert not Path("out").exists()


def test_a_full_disk_is_one_line(demo, text_file, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ReportFolder, "save", full)
    assert demo(*tiny(text_file, "out")) == 1
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_the_seed_changes_the_numbers(demo, text_file):
    demo(*tiny(text_file, "zero"))
    demo(*tiny(text_file, "one"), "--seed", 1)
    assert metrics("zero")[0]["validation_loss"] != metrics("one")[0]["validation_loss"]
