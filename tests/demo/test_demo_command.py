import json
import sys
from pathlib import Path

import pytest

from seqwarm_kernels.demo.training import Trainer

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.usefixtures("without_figure")

FILES = {"checkpoint.pt", "configuration.json", "metrics.jsonl", "report.md", "report.png"}


def tiny(text, report):
    sizes = ["--quick", "--steps", 4, "--seq-length", 24, "--layers", 1, "--width", 16]
    return ["--device", "cpu", *sizes, "--text", text, "--report", report]


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


def test_a_whole_run(demo, text_file, capsys, monkeypatch):
    options = [*tiny(text_file, "out"), "--seed", 3, "--learning-rate", 0.002]
    assert demo(*options) == 0
    assert {path.name for path in Path("out").iterdir()} == FILES
    records = metrics("out")
    assert [record["run"] for record in records] == ["baseline"] * 5 + ["warmup"] * 5
    assert records[4]["tokens"] == records[9]["tokens"] == 4 * 8 * 24
    assert records[0]["validation_loss"] == records[5]["validation_loss"]
    assert list(records[0]) == [
        "run", "step", "tokens", "seconds", "seq_length", "learning_rate", "train_loss", "validation_loss",
    ]  # fmt: skip
    printed = capsys.readouterr()
    assert "warmup_allocator" in printed.out
    assert printed.err == ""  # no progress bar without a terminal
    page = Path("out/report.md").read_text()
    final = f"{records[4]['validation_loss']:.4f}"
    for part in (final, "](<report.png>)", "| sequence-length warmup |", "| seed | 3 |", str(text_file), "torch 2"):
        assert part in page
    assert "`seqwarm demo --device cpu --quick" in page

    stop_at_step(monkeypatch, 0, AssertionError("nothing is left to train"))
    Path("out/report.md").unlink()
    assert demo(*options, "--json") == 0  # writes the report again
    result = json.loads(capsys.readouterr().out)
    assert result["records"] == records
    assert result["target_loss"] == records[4]["validation_loss"]
    assert result["settings"]["seed"] == 3
    assert result["settings"]["peak_learning_rate"] == 0.002
    assert Path("out/report.md").exists()


@pytest.mark.parametrize("steps_before", [3, 7])
def test_a_stopped_run_goes_on_to_the_same_numbers(demo, text_file, monkeypatch, capsys, steps_before):
    demo(*tiny(text_file, "uninterrupted"))
    with monkeypatch.context() as patch:
        stop_at_step(patch, steps_before, KeyboardInterrupt())
        assert demo(*tiny(text_file, "stopped")) == 130
    assert "--report stopped" in capsys.readouterr().err
    before = metrics("stopped")
    Path("stopped/metrics.jsonl").write_text("")  # behind the checkpoint
    Path("stopped/checkpoint.pt.0123456789abcdef.partial").touch()
    assert demo(*tiny(text_file, "stopped")) == 0
    assert metrics("stopped")[: len(before)] == before
    assert without_seconds(metrics("stopped")) == without_seconds(metrics("uninterrupted"))
    assert {path.name for path in Path("stopped").iterdir()} == FILES


def fails(demo, capsys, *options, status=2):
    """Returns the only line that is printed."""
    assert demo(*options) == status
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("seqwarm demo: error: ")
    return line


def test_a_run_is_never_overwritten_or_continued_with_another_setting_or_text(demo, text_file, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at_step(patch, 1, KeyboardInterrupt())
        demo(*tiny(text_file, "out"))
    capsys.readouterr()
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    assert "layers" in fails(demo, capsys, *tiny(text_file, "out"), "--layers", 2)
    text_file.write_text(text_file.read_text() + "more")
    assert "text" in fails(demo, capsys, *tiny(text_file, "out"))
    assert before == {path: path.read_bytes() for path in Path("out").iterdir()}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--seq-length", 8], "seq_length"),
        (["--width", 130], "width"),
        (["--device", "cuda:99"], "device"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--text", "text.py", "--report", "."], "folder"),  # it has other files
    ],
)
def test_errors_are_one_line(demo, text_file, capsys, options, name):
    assert name in fails(demo, capsys, *options)
    assert not Path("reports").exists()


def test_a_missing_package_is_named_before_training(demo, text_file, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "seqwarm_kernels[demo]" in fails(demo, capsys, *tiny(text_file, "out"), status=1)
    assert not Path("out").exists()
