"""The folder of a run that may be stopped: the same call with the same folder goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checks import check_same_configuration
from .files import remove_partial_files, write_atomically

CONFIGURATION = "configuration.json"


@dataclass(frozen=True)
class RunFolder:
    """A folder with the configuration of its run. Files are replaced as a whole, so a kill leaves none half written."""

    path: Path

    @staticmethod
    def open(path: Path, configuration: Mapping[str, Any]) -> RunFolder:
        """A new folder, or the folder of an earlier run with the same configuration, which are plain JSON values.

        Raises:
            ValueError: the folder has a run of another configuration, or other files.
        """
        folder = RunFolder(path)
        path.mkdir(parents=True, exist_ok=True)
        if (path / CONFIGURATION).exists():
            saved = folder.read_json(CONFIGURATION)
            check_same_configuration(saved, configuration, source=f"the run in folder {path}")
        elif any(not entry.name.startswith(CONFIGURATION) for entry in path.iterdir()):
            raise ValueError(f"folder must be new, empty or the folder of an earlier run, got {path}")
        else:
            folder.write_json(CONFIGURATION, configuration)
        remove_partial_files(path)
        return folder

    def read_json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        try:
            values = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{file} must be a JSON object, got {values!r}")
        return values

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        self.write(name, json.dumps(values, indent=2, allow_nan=False).encode())

    def write(self, name: str, content: bytes) -> None:
        write_atomically(self.path / name, content)
