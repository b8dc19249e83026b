"""Where a monitor's records go: files of JSON lines, and TensorBoard."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import IO, Any

from ..utils.files import write_atomically
from .records import StepRecord

#: Of every record's line.
_BEGINNING = b'{"step": '


class JsonLines:
    """A file with one JSON object a line for each step: the fields of `StepRecord`, and the caller's own numbers.

    NaN and infinity, which JSON has not, are null. Lines that are there when a record comes stay, but for those of its
    step and of later ones: a training that resumes from step 100 takes back what was written after it, and one that
    begins anew begins the file anew. A line that was cut off by a kill is taken back as well.

    Args:
        path: the file; its folder must exist.

    Raises:
        ValueError: there is no such folder, or the file holds other lines.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise ValueError(f"path must be in a folder that exists, got {self.path}")
        _lines_before(self.path, 1)  # can it be read?
        self._file: IO[str] | None = None
        self._last_step = 0

    def __call__(self, record: StepRecord) -> None:
        if self._file is None or record.step <= self._last_step:
            self.close()
            if (kept := _lines_before(self.path, record.step)) is not None:
                write_atomically(self.path, kept)
            self._file = self.path.open("a", encoding="utf-8", buffering=1)  # a line is with the system at once
        self._file.write(record.to_json() + "\n")
        self._last_step = record.step

    def close(self) -> None:
        """The file is closed; a further record opens it again."""
        file, self._file = self._file, None  # gone also where its last line does not fit on the disk
        if file is not None:
            file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_file": None}


def _lines_before(path: Path, step: int) -> bytes | None:
    """What a file has of earlier steps; None if that is all of it."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if _step_of(line, path) < step]
    return b"".join(kept) if kept != lines else None


def _step_of(line: bytes, path: Path) -> float:
    """Infinity for the beginning of a record that was cut off."""
    if not line.endswith(b"\n") and (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)):
        return math.inf
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"path must be a file of StepRecords, got {path} with the line {line[:80]!r}") from error


class TensorBoard:
    """The numbers of each step as TensorBoard's scalars.

    Args:
        log_dir: a folder, or a SummaryWriter, which stays the caller's to close. In a folder, what was written of steps
            that come again, in a run that resumes or goes back, is hidden; in a writer of the caller's it is not.
        prefix: before the names of all numbers.

    Raises:
        ImportError: the package tensorboard is not installed.
        TypeError: `log_dir` is neither.
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
        """A folder's writer is closed; a further record opens another one."""
        if self._folder is not None and self._writer is not None:
            self._writer.close()
            self._writer = None
