"""Files that are there whole or not at all, whenever the process is killed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

#: Ends the name of what is being written. A process that was killed leaves it behind; never read, free to delete.
PARTIAL_SUFFIX = ".partial"


def write_atomically(path: Path, content: bytes) -> None:
    """A reader sees the old content or the new one, also after a power cut and with several writers at once."""
    with open_atomically(path) as file:
        file.write(content)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end, unless something was raised."""
    partial = partial_of(path)
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def partial_of(path: Path) -> Path:
    """A name of this writer's own, in the same folder: os.replace must not copy."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")


def sync_folder(path: Path) -> None:
    """The new name, too, must be on the disk; systems that cannot open a folder do that themselves."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
