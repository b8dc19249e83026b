"""Binary files of tokens, local or at URLs. Errors name the file and the byte."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .reader import ChunkError, reason_of
from .remote import AnyPath, local_file


class DataFile:
    """A file that is read from its local copy, if it is at a URL. Errors name the URL.

    The file is opened anew for each read, so a `DataFile` can be pickled and shared by processes. It is not mapped into
    memory: if a mapped file is cut short while it is read, the process ends without an error.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = path

    @cached_property
    def local(self) -> Path:
        """The file, or its local copy.

        Raises:
            ChunkError: The file cannot be copied.
        """
        try:
            return local_file(self.path)
        except OSError as error:
            raise self.unreadable(error) from error

    @cached_property
    def size(self) -> int:
        """Size in bytes when it was first asked for.

        Raises:
            ChunkError: The file is missing, empty, or a folder.
        """
        try:
            facts = self.local.stat()
        except OSError as error:
            raise self.unreadable(error) from error
        if self.local.is_dir():
            raise self.error("is a folder, not a file")
        if not facts.st_size:
            raise self.error("the file is empty")
        return facts.st_size

    def read(self, dtype: np.dtype[Any], first_byte: int, count: int) -> NDArray[Any]:
        """Read `count` values of `dtype` that begin at a byte.

        Raises:
            ChunkError: The file cannot be read, or ends before the last value.
        """
        return self.read_parts(dtype, [(first_byte, count)])[0]

    def read_parts(self, dtype: np.dtype[Any], parts: Sequence[tuple[int, int]]) -> list[NDArray[Any]]:
        """Read several parts of the file: the first byte of each, and its number of values of `dtype`.

        Raises:
            ChunkError: The file cannot be read, or ends before the last value.
        """
        try:
            with self.local.open("rb", buffering=0) as file:
                if len(parts) > 1:
                    _announce(file.fileno(), parts, dtype.itemsize)
                return [self._read_part(file, dtype, *part) for part in parts]
        except OSError as error:
            raise self.unreadable(error) from error

    def _read_part(self, file: FileIO, dtype: np.dtype[Any], first_byte: int, count: int) -> NDArray[Any]:
        values = np.empty(count, dtype)
        rest = values.view(np.uint8).data if count else memoryview(b"")
        file.seek(first_byte)
        while len(rest):
            read = file.readinto(rest)
            if not read:
                problem = f"the file ends, {first_byte + values.nbytes:,} bytes are needed"
                raise self.error_at(file.seek(0, 2), problem)
            rest = rest[read:]
        return values

    def check_size(self, expected: int, reason: str) -> None:
        """The file must have `expected` bytes. The error says why: `reason`, and names the byte where it differs."""
        if self.size != expected:
            raise self.error_at(min(self.size, expected), f"{reason}, the file has {self.size:,}")

    def error(self, problem: str) -> ChunkError:
        return ChunkError(self.path, None, problem)

    def error_at(self, byte: int, problem: str) -> ChunkError:
        return ChunkError(self.path, None, f"at byte {byte:,}, {problem}")

    def unreadable(self, error: OSError) -> ChunkError:
        return self.error(f"cannot be read: {reason_of(error)}")


def _announce(descriptor: int, parts: Sequence[tuple[int, int]], itemsize: int) -> None:
    """Let the system fetch all parts at once, where it can be told, instead of one after another."""
    if hasattr(os, "posix_fadvise"):
        for first_byte, count in parts:
            os.posix_fadvise(descriptor, first_byte, count * itemsize, os.POSIX_FADV_WILLNEED)


def as_token_dtype(name: str, dtype: object) -> np.dtype[Any]:
    """Return a dtype of ints.

    Raises:
        TypeError: `dtype` does not name a dtype.
        ValueError: It is a dtype of other values.
    """
    wanted = f"{name} must be a NumPy dtype of ints such as 'uint16'"
    if not isinstance(dtype, (str, type, np.dtype)):
        raise TypeError(f"{wanted}, got {type(dtype).__name__}")
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{wanted}, got {dtype!r:.60}") from error
    if found.kind not in "iu":
        raise ValueError(f"{wanted}, got {found}")
    return found
