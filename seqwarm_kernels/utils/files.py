"""Files that are written atomically: a killed process leaves no half-written file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

#: Suffix of a file that is being written. A killed process leaves such a file; it is never read and can be deleted.
PARTIAL_SUFFIX = ".partial"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file. Readers see the old or the new content, even after a power cut or with several writers."""
    with open_atomically(path) as file:
        file.write(content)


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Errors of the system name the file. Python's own errors about writing, as on a full disk, do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which replaces `path` at the end if no exception was raised."""
    partial = partial_of(path)
    try:
        with naming_file(path):
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
    """A path that no other writer uses, in the same folder, so that os.replace does not copy."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")


def sync_folder(path: Path) -> None:
    """Write new file names to the disk. Systems that cannot open a folder do this themselves."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
