import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_train_plain():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = ROOT / "examples" / "train_plain.py"
    done = subprocess.run(
        [sys.executable, script, "--steps", "20"], env=environment, capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
    lengths = [int(words[3]) for words in lines]
    losses = [float(words[5]) for words in lines]
    assert lengths[0] == 16
    assert lengths == sorted(lengths)
    assert lengths[-1] == 128
    assert losses[-1] < losses[0] - 1


def dynamic_batching(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "examples" / "dynamic_batching.py", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_dynamic_batching_on_a_small_text(tmp_path):
    (tmp_path / "small.txt").write_text("one\ntwo words\nthree\n")
    done = dynamic_batching("--text", tmp_path / "small.txt")
    assert done.returncode == 0, done.stderr
    assert "3 items in 1 files" in done.stdout
    assert "resumed after 0 items" in done.stdout


def test_dynamic_batching_with_a_missing_text():
    done = dynamic_batching("--text", "missing.txt")
    assert done.returncode == 1
    assert done.stderr == "dynamic_batching.py: no such file or folder: missing.txt\n"


def test_dynamic_batching(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    done = dynamic_batching("--figure", tmp_path / "padding.png")
    assert done.returncode == 0, done.stderr
    padding = re.findall(r"^[^%\n]* (\d+\.\d)%", done.stdout, re.MULTILINE)
    random, window, greedy, ours, packed = map(float, padding)
    assert random > window > greedy >= ours > packed == 0
    assert "resumed after" in done.stdout
    assert (tmp_path / "padding.png").stat().st_size > 10_000
