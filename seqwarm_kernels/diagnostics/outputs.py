"""Outputs of a TrainingMonitor: JSON Lines files and TensorBoard."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import IO, Any

from ..utils.files import write_atomically
from .records import StepRecord

#: The first bytes of each line.
_LINE_START = b'{"step": '


class JsonLines:
    """Writes one line of JSON for each step: the fields of `StepRecord`, and the caller's own numbers.

    NaN and infinity, which JSON cannot represent, become null. A new record replaces the lines of its own step and of
    later steps. If training resumes from step 100, lines after step 100 are removed; if training starts again from the
    beginning, so does the file. An incomplete last line, left by a process that was killed, is removed as well.

    Args:
        path: the file to write. Its folder must exist.

    Raises:
        ValueError: the folder does not exist, or the file has lines that are not StepRecords.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise ValueError(f"path must be in a folder that exists, got {self.path}")
        _lines_before(self.path, 1)  # raises if the file has other lines
        self._file: IO[str] | None = None
        self._last_step = 0

    def __call__(self, record: StepRecord) -> None:
        if self._file is None or record.step <= self._last_step:
            self.close()
            if (kept := _lines_before(self.path, record.step)) is not None:
                write_atomically(self.path, kept)
            self._file = self.path.open("a", encoding="utf-8", buffering=1)  # line buffering
        self._file.write(record.to_json() + "\n")
        self._last_step = record.step

    def close(self) -> None:
        """Close the file. The next record opens it again."""
        file, self._file = self._file, None  # also if close() raises because the disk is full
        if file is not None:
            file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None}


def _lines_before(path: Path, step: int) -> bytes | None:
    """The lines of steps before `step`; None if the file has no other lines."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if _step_of(line, path) < step]
    return b"".join(kept) if kept != lines else None


def _step_of(line: bytes, path: Path) -> float:
    """The step of a line; infinity for an incomplete line."""
    if not line.endswith(b"\n") and (line.startswith(_LINE_START) or _LINE_START.startswith(line)):
        return math.inf
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"path must be a file of StepRecords, got {path} with the line {line[:80]!r}") from error


class TensorBoard:
    """Writes the numbers of each step as TensorBoard scalars.

    Args:
        log_dir: a folder, or a SummaryWriter that the caller closes. If a run resumes from an earlier step, TensorBoard
            hides the old values of the repeated steps in a folder, but not in the caller's SummaryWriter.
        prefix: prefix of the name of each scalar.

    Raises:
        ImportError: the package tensorboard is not installed.
        TypeError: `log_dir` is neither a path nor a SummaryWriter.
    """

    def __init__(self, log_dir: Any, prefix: str = "optimizer/") -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("tensorboard is needed: pip install seqwarm_kernels[tensorboard]") from error
        self._prefix = prefix
        self._folder: str | None = None
        self._writer: Any = log_dir
        if isinstance(log_dir, (str, os.PathLike)):
            self._folder, self._writer = os.fspath(log_dir), None
        elif not callable(getattr(log_dir, "add_scalar", None)):
            raise TypeError(f"log_dir must be a folder or a SummaryWriter, got {type(log_dir).__name__}")
        self._make_writer = SummaryWriter
        self._last_step = 0

    def __call__(self, record: StepRecord) -> None:
        if record.step <= self._last_step:
            self.close()
        if self._writer is None:
            self._writer = self._make_writer(self._folder, purge_step=record.step)
        self._last_step = record.step
        for name, value in record.numbers().items():
            if name != "step" and value is not None:
                self._writer.add_scalar(self._prefix + name, value, record.step)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the writer of a folder. The next record opens a new writer."""
        if self._folder is not None and self._writer is not None:
            self._writer.close()
            self._writer = None
