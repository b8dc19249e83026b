"""Trials on disk: what was trained is not trained again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..utils.files import PARTIAL_SUFFIX, write_atomically
from .configuration import Configuration
from .trial import Trial
from .validation import Validation

CONFIGURATION = "configuration.json"
RESULT = "result.json"


@dataclass(frozen=True)
class TrialFolder:
    """One JSON file for the configuration, one for each trial, and one for the result."""

    path: Path

    @staticmethod
    def open(path: Path, configuration: Configuration) -> TrialFolder:
        """A new folder, or the one of a search to go on with.

        Raises:
            ValueError: it holds trials of another configuration, or other things, or the pacing has no name.
        """
        _check_has_name(configuration.to_json()["pacing"])
        folder = TrialFolder(path)
        file = path / CONFIGURATION
        if file.exists():
            _check_same(path, _read(file), configuration.to_json())
            return folder
        if path.exists() and (not path.is_dir() or any(not _is_ours(entry) for entry in path.iterdir())):
            raise ValueError(f"folder must be a new or empty one, or hold trials, got {path}")
        path.mkdir(parents=True, exist_ok=True)
        _write(file, configuration.to_json())
        return folder

    def load(self, trial: Trial) -> Trial:
        """The trial with what was recorded of it, if anything was.

        Raises:
            ValueError: the record cannot be read.
        """
        file = self._file(trial)
        if not file.exists():
            return trial
        try:
            for entry in _read(file)["validations"]:
                trial = trial.then(Validation(entry["progress"], float(entry["perplexity"]), entry["tokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} cannot be read: {error!r}; without it the trial is run again") from error
        return trial

    def save(self, trial: Trial) -> None:
        _write(self._file(trial), trial.to_json())

    def save_result(self, result: dict[str, Any]) -> None:
        _write(self.path / RESULT, result)

    def _file(self, trial: Trial) -> Path:
        return self.path / f"trial_min{trial.min_seq_length}_duration{trial.duration}.json"


def _is_ours(entry: Path) -> bool:
    """Left behind by a process that was killed before the first file was whole."""
    return entry.name.endswith(PARTIAL_SUFFIX)


def _check_has_name(pacing: str) -> None:
    if pacing.endswith("<lambda>"):
        raise ValueError("pacing must be a function with a name of its own where folder is given, got a lambda")


def _check_same(path: Path, there: Any, here: dict[str, Any]) -> None:
    if not isinstance(there, dict) or there.keys() != here.keys():
        raise ValueError(f"{path / CONFIGURATION} must have the entries {list(here)}, got {there!r}")
    if not isinstance(there["settings"], dict):
        raise ValueError(f"settings in {path / CONFIGURATION} must be an object, got {there['settings']!r}")
    stored = _flat(there)
    for name, value in _flat(here).items():
        if name not in stored or stored[name] != value:
            other = json.dumps(stored[name]) if name in stored else "missing"
            raise ValueError(
                f"folder {path} holds trials of another configuration: {name} is {other} there, "
                f"{json.dumps(value)} here"
            )
    gone = stored.keys() - _flat(here).keys()
    if gone:
        raise ValueError(f"folder {path} holds trials of another configuration: it has {sorted(gone)}, none is here")


def _flat(configuration: dict[str, Any]) -> dict[str, Any]:
    """The user's own settings among the others, so that a difference is named."""
    rest = {name: value for name, value in configuration.items() if name != "settings"}
    return {**rest, **{f"settings[{name!r}]": value for name, value in configuration["settings"].items()}}


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _write(file: Path, values: dict[str, Any]) -> None:
    write_atomically(file, json.dumps(values, indent=2, allow_nan=False).encode())
