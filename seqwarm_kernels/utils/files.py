"""The files of a folder, and files that are written atomically: a killed process leaves no half-written file."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn

from .checks import check_path

#: Suffix of a file that is being written. A killed process leaves such a file; it is never read and can be deleted.
PARTIAL_SUFFIX = ".partial"
_PARTIAL_BYTES = 8  #: of the random part of its name


def visible_files(folder: str | os.PathLike[str], onerror: Callable[[OSError], object] | None = None) -> list[Path]:
    """The files of a folder and of its subfolders, sorted.

    Hidden files and folders are left out, and so are files that a process began to write and did not finish
    (`.partial`). Links to files are followed, links to folders are not.

    Args:
        folder: path of the folder.
        onerror: called with the error of each folder or file that cannot be reached, such as a link to nothing. Its
            `filename` names the path. By default the first error is raised.

    Raises:
        TypeError: `folder` is not a path.
        OSError: a folder or file cannot be reached, and there is no `onerror`.
    """
    report, found = onerror or _raise, []
    for parent, folders, names in os.walk(check_path("folder", folder), onerror=report):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in names if not name.startswith(".")):
            try:
                if path.suffix != PARTIAL_SUFFIX and stat.S_ISREG(path.stat().st_mode):
                    found.append(path)
            except OSError as error:
                report(error)
    return sorted(found)


def _raise(error: OSError) -> NoReturn:
    raise error


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
    return path.with_name(f"{path.name}.{secrets.token_hex(_PARTIAL_BYTES)}{PARTIAL_SUFFIX}")


def remove_partial_files(folder: Path) -> None:
    """Remove what killed processes left in a folder that no other process writes to."""
    for partial in folder.glob(f"*.{'[0-9a-f]' * 2 * _PARTIAL_BYTES}{PARTIAL_SUFFIX}"):
        partial.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Write new file names to the disk. Systems that cannot open a folder do this themselves."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
