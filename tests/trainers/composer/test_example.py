"""examples/train_composer.py runs, and prints what its text says."""

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("composer", reason="needs Composer: make test-composer")


def test_train_composer(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_composer.py", "--steps", "12"])
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "train_composer.py"), run_name="__main__")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    lengths = [int(words[3]) for words in lines]
    assert lengths[0] < lengths[-1] == 128
    assert float(lines[-1][5]) < float(lines[0][5])
