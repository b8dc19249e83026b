"""Files that are there whole or not at all, whenever the process is killed."""

from __future__ import annotations

import os
from pathlib import Path

#: What a process that was killed while writing leaves behind; never read.
PARTIAL_SUFFIX = ".partial"


def write_atomically(path: Path, content: bytes) -> None:
    """A reader sees the old content or the new one, also after a power cut."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)  # the same folder: os.replace must not copy
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """The new name, too, must be on the disk; systems that cannot open a folder do that themselves."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
