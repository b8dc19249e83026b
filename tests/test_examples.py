"""The examples run, and print what their comments say."""

import re
import runpy
import statistics
import sys
from pathlib import Path

import pytest

from .support.tiers import first_fast

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs an example with arguments, and returns what it printed."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("script", "package"),
    [("plain", "torch"), *first_fast([("huggingface", "transformers"), ("lightning", "lightning")])],
)
def test_trainings(run, script, package):
    pytest.importorskip(package)
    lines = [line.split() for line in run(f"train_{script}.py", "--steps", 12).splitlines() if line.startswith("step")]
    lengths = [int(words[3]) for words in lines]
    losses = [float(words[5]) for words in lines]
    assert lengths[0] < lengths[-1] == 128
    assert lengths == sorted(lengths)
    assert losses[-1] < losses[0] - 1


def test_train_packed(run):
    lines = [line.split() for line in run("train_packed.py", "--steps", 30).splitlines()]
    tokens = sorted(int(words[4]) for words in lines)
    assert tokens[1] > 900  # the last batch of an epoch may have few
    assert tokens[-1] <= 1024
    first, *losses = (float(words[7]) for words in lines)
    assert statistics.median(losses) < first - 1  # a batch may be odd: Python's documentation changes


def test_dynamic_batching_on_a_small_text(run, tmp_path):
    (tmp_path / "small.txt").write_text("one\ntwo words\nthree\n")
    printed = run("dynamic_batching.py", "--text", tmp_path / "small.txt")
    assert "3 items in 1 files" in printed
    assert "resumed after 0 items" in printed


@pytest.mark.slow
def test_dynamic_batching(run, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    printed = run("dynamic_batching.py", "--figure", tmp_path / "padding.png")
    padding = re.findall(r"^[^%\n]* (\d+\.\d)%", printed, re.MULTILINE)
    random, window, greedy, ours, packed = map(float, padding)
    assert random > window > greedy >= ours > packed == 0
    assert "resumed after" in printed
    assert (tmp_path / "padding.png").stat().st_size > 10_000
