"""The report folder: settings, checkpoint and metrics, and the report at the end."""

from __future__ import annotations

import io
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..utils.files import PARTIAL_SUFFIX, remove_partial_files, write_atomically
from .records import Record
from .settings import Settings
from .text import Corpus

REPORTS = Path("reports")
SETTINGS = "settings.json"
CHECKPOINT = "checkpoint.pt"
METRICS = "metrics.jsonl"
SUMMARY = "summary.md"  #: written last: a folder with it is finished


@dataclass(frozen=True)
class Checkpoint:
    """All evaluations so far, and the state of the run of the last evaluation."""

    records: list[Record]
    trainer: dict[str, Any] | None


@dataclass(frozen=True)
class ReportFolder:
    path: Path

    @staticmethod
    def create(given: str | None, settings: Settings, corpus: Corpus, command: str) -> ReportFolder:
        """Makes a new folder, and writes the settings and the command line to it.

        Raises:
            ValueError: the folder is not empty.
        """
        path = Path(given) if given is not None else REPORTS / time.strftime("demo-%Y%m%d-%H%M%S")
        if (path / SETTINGS).exists():
            raise ValueError(f"{path} contains a run already: continue it with --resume {path}, or name a new folder")
        if path.exists() and (not path.is_dir() or _visible_entries(path)):
            raise ValueError(f"--report must name a new or empty folder, got {path}")
        path.mkdir(parents=True, exist_ok=True)
        remove_partial_files(path)
        stored = {"settings": settings.to_json(), "text_sha256": corpus.fingerprint(), "command": command}
        write_atomically(path / SETTINGS, json.dumps(stored, indent=2).encode())
        return ReportFolder(path)

    @staticmethod
    def to_resume(given: str | None, report: str | None) -> ReportFolder:
        """Returns the folder to resume: that of --resume, or of --report, or else the newest unfinished one."""
        if given is not None and report is not None and Path(given).resolve() != Path(report).resolve():
            raise ValueError(f"--resume {given} and --report {report} name two folders")
        named = given if given is not None else report
        path = _newest_unfinished() if named is None else Path(named)
        if not (path / SETTINGS).is_file():
            raise ValueError(f"{named} has no run to resume: it does not contain {SETTINGS}")
        remove_partial_files(path)
        return ReportFolder(path)

    def settings(self) -> Settings:
        """Returns the settings of the run.

        Raises:
            ValueError: the file is invalid: it was written by another version, or changed by hand.
        """
        try:
            return Settings.from_json(self._stored()["settings"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self.path / SETTINGS} cannot be read: {error!r}") from error

    def check_same_text(self, corpus: Corpus) -> None:
        if self._stored().get("text_sha256") != corpus.fingerprint():
            raise ValueError(f"the text has changed since the run in {self.path} began: {corpus.source}")

    def command(self) -> str:
        """Returns the command line that started the run; older versions did not record it."""
        return self._stored().get("command", "not recorded")

    def _stored(self) -> dict[str, Any]:
        return json.loads((self.path / SETTINGS).read_text())

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes the checkpoint, and then all metrics, so that the metrics are never ahead of the checkpoint."""
        records = [asdict(record) for record in checkpoint.records]
        buffer = io.BytesIO()
        torch.save({"records": records, "trainer": checkpoint.trainer}, buffer)
        write_atomically(self.path / CHECKPOINT, buffer.getvalue())
        lines = [json.dumps(record) + "\n" for record in records]
        write_atomically(self.path / METRICS, "".join(lines).encode())

    def load(self) -> Checkpoint:
        """Returns the last checkpoint, or an empty one before the first."""
        path = self.path / CHECKPOINT
        if not path.exists():
            return Checkpoint(records=[], trainer=None)
        stored = torch.load(path, map_location="cpu", weights_only=True)
        return Checkpoint([Record(**record) for record in stored["records"]], stored["trainer"])

    def write(self, name: str, content: bytes) -> None:
        write_atomically(self.path / name, content)


def _visible_entries(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if not entry.name.endswith(PARTIAL_SUFFIX)]


def _newest_unfinished() -> Path:
    """Returns the unfinished run that was started last. The settings are written when a run starts."""
    runs = [path.parent for path in REPORTS.glob(f"*/{SETTINGS}") if not (path.parent / SUMMARY).exists()]
    if not runs:
        raise ValueError(f"there is no unfinished run in {REPORTS}/: name the folder of a run after --resume")
    return max(runs, key=lambda path: (path / SETTINGS).stat().st_mtime)
