"""Outputs of a TrainingMonitor: JSON Lines files and TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from ..utils.checks import check_path, needs
from ..utils.files import naming_file, write_atomically
from .records import StepRecord

#: The first bytes of each line.
_LINE_START = b'{"step": '

#: Suffix of the file that keeps the lines of repeated steps.
_REPLACED_SUFFIX = ".replaced"


class JsonLines:
    """Writes one line of JSON for each step: the fields of `StepRecord`, and the caller's own numbers.

    NaN and infinity, which JSON cannot represent, become null. A new record replaces the lines of its own step and of
    later steps. If training resumes from step 100, lines after step 100 leave the file; if training starts again from
    the beginning, so does the file. No record is lost: lines that leave the file are appended to a file beside it,
    `monitor.jsonl.replaced` for `monitor.jsonl`. Only an incomplete last line, left by a process that was killed, is
    removed.

    Args:
        path: the file to write. Its folder is made if there is none.

    Raises:
        TypeError: `path` is not a path.
        ValueError: `path` is a folder, a pipe or a device, or the file has lines that are not StepRecords.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = check_path("path", path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not self.path.is_file():  # reading a pipe would wait for its end
            raise ValueError(f"path must be a regular file, got {self.path}")
        _split_at(_content(self.path), 1, self.path)  # raises if the file has other lines
        self._file: IO[str] | None = None
        self._last_step = 0

    def __call__(self, record: StepRecord) -> None:
        if self._file is None or record.step <= self._last_step or self._was_replaced(self._file):
            self.close()
            self._remove_from(record.step)
            self._file = self.path.open("a", encoding="utf-8", buffering=1)  # line buffering
        with naming_file(self.path):
            self._file.write(record.to_json() + "\n")
        self._last_step = record.step

    def _was_replaced(self, file: IO[str]) -> bool:
        """Whether the path names another file than the open one, or none."""
        return not (self.path.exists() and os.path.samestat(os.fstat(file.fileno()), self.path.stat()))

    def _remove_from(self, step: int) -> None:
        """Move the lines of `step` and of later steps to the file beside. A kill in between repeats lines there."""
        content = _content(self.path)
        kept, replaced = _split_at(content, step, self.path)
        if replaced:
            with self.path.with_name(self.path.name + _REPLACED_SUFFIX).open("ab") as beside:
                beside.write(replaced)
                beside.flush()
                os.fsync(beside.fileno())
        if kept != content:
            write_atomically(self.path, kept)

    def close(self) -> None:
        """Close the file. The next record opens it again."""
        file, self._file = self._file, None  # also if close() raises because the disk is full
        if file is not None:
            file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None}


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _split_at(content: bytes, step: int, path: Path) -> tuple[bytes, bytes]:
    """The lines of steps before `step`, and those of `step` and later steps, without a last line that is incomplete."""
    lines = content.splitlines()
    if lines and _is_incomplete(lines[-1]):
        lines.pop()
    steps = [_step_of(line, path) for line in lines]
    kept = [line + b"\n" for line, found in zip(lines, steps, strict=True) if found < step]
    replaced = [line + b"\n" for line, found in zip(lines, steps, strict=True) if found >= step]
    return b"".join(kept), b"".join(replaced)


def _is_incomplete(line: bytes) -> bool:
    """Whether the line is the beginning of a record."""
    return not line.endswith(b"}") and (line.startswith(_LINE_START) or _LINE_START.startswith(line))


def _step_of(line: bytes, path: Path) -> int:
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
    """

    def __init__(self, log_dir: Any, prefix: str = "optimizer/") -> None:
        with needs("scalars need tensorboard", "seqwarm_kernels[tensorboard]"):
            from torch.utils.tensorboard import SummaryWriter
        self._prefix = prefix
        self._folder: str | None = None
        self._writer: Any = log_dir
        if isinstance(log_dir, (str, os.PathLike)):
            self._folder, self._writer = os.fspath(log_dir), None
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
