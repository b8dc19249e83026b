import argparse
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from seqwarm_kernels import cli


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """30,000 bytes of text in one file."""
    path = tmp_path / "text.py"
    path.write_text(inspect.getsource(argparse)[:30_000])
    return path


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Returns a function that runs the command in an empty folder and returns its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*options: object) -> int:
        return cli.main(["demo", *map(str, options)])

    return run


@pytest.fixture
def without_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the seconds that drawing takes."""
    monkeypatch.setattr("seqwarm_kernels.demo.report.write_figure", lambda draw, path: path.touch())
