"""Trials on disk, so that a resumed search does not repeat finished trials."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..utils.checks import check_same_configuration
from ..utils.files import PARTIAL_SUFFIX, remove_partial_files, write_atomically
from .configuration import SearchConfiguration
from .trial import Trial

CONFIGURATION = "configuration.json"
RESULT = "result.json"


@dataclass(frozen=True)
class TrialFolder:
    """A folder with one JSON file for the configuration, one for each trial, and one for the result."""

    path: Path

    @staticmethod
    def open(path: Path, configuration: SearchConfiguration) -> TrialFolder:
        """A new folder, or the folder of an earlier search to resume.

        Raises:
            ValueError: the folder has trials of another configuration or other files, or the pacing has no name.
        """
        current = configuration.to_json()
        if current["pacing"].endswith("<lambda>"):
            raise ValueError("pacing must be a named function if folder is given, got a lambda")
        file = path / CONFIGURATION
        if file.exists():
            _check_same_configuration(file, current)
            remove_partial_files(path)
            return TrialFolder(path)
        if path.exists() and (not path.is_dir() or any(not _is_partial(entry) for entry in path.iterdir())):
            raise ValueError(f"folder must be new, empty or the folder of an earlier search, got {path}")
        path.mkdir(parents=True, exist_ok=True)
        remove_partial_files(path)
        _write(file, current)
        return TrialFolder(path)

    def load(self, trial: Trial) -> Trial:
        """The trial with its recorded validations, if there is a record.

        Raises:
            ValueError: the record cannot be read.
        """
        file = self._file(trial)
        if not file.exists():
            return trial
        try:
            return trial.replayed(_read(file)["validations"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} cannot be read: {error!r}; delete the file to run the trial again") from error

    def save(self, trial: Trial) -> None:
        _write(self._file(trial), trial.to_json())

    def save_result(self, result: dict[str, Any]) -> None:
        _write(self.path / RESULT, result)

    def _file(self, trial: Trial) -> Path:
        return self.path / f"trial_min{trial.min_seq_length}_duration{trial.duration}.json"


def _is_partial(entry: Path) -> bool:
    """Whether a process that was killed while it wrote its first file left this entry."""
    return entry.name.endswith(PARTIAL_SUFFIX)


def _check_same_configuration(file: Path, current: dict[str, Any]) -> None:
    saved = _read(file)
    if not isinstance(saved, dict) or saved.keys() != current.keys():
        raise ValueError(f"{file} must have the entries {list(current)}, got {saved!r}")
    if not isinstance(saved["settings"], dict):
        raise ValueError(f"settings in {file} must be an object, got {saved['settings']!r}")
    check_same_configuration(_flat(saved), _flat(current), source=f"the search in folder {file.parent}")


def _flat(configuration: dict[str, Any]) -> dict[str, Any]:
    """The configuration with each of the user's settings as an entry, so that an error names the one that differs."""
    rest = {name: value for name, value in configuration.items() if name != "settings"}
    return {**rest, **{f"settings[{name!r}]": value for name, value in configuration["settings"].items()}}


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _write(file: Path, values: dict[str, Any]) -> None:
    write_atomically(file, json.dumps(values, indent=2, allow_nan=False).encode())
