"""Binary files of tokens, local or at URLs. Errors name the file and the byte."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .reader import ChunkError, chunk_errors
from .remote import AnyPath, local_file


class DataFile:
    """A file that is read from its local copy, if it is at a URL. Errors name the URL.

    The file is opened anew for each read, so a `DataFile` can be pickled and shared by processes. It is not mapped into
    memory: if a mapped file is cut short while it is read, the process ends without an error.

    Every method raises a `ChunkError` if the file is missing, cannot be read, or ends before the last value.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = path

    @cached_property
    def local(self) -> Path:
        """The file, or its local copy."""
        with chunk_errors(self.path):
            return local_file(self.path)

    @cached_property
    def size(self) -> int:
        """Size in bytes when it was first asked for."""
        with chunk_errors(self.path), self.local.open("rb") as file:
            return os.fstat(file.fileno()).st_size

    def read(self, dtype: np.dtype[Any], first_byte: int, count: int) -> NDArray[Any]:
        """Read `count` values of `dtype` that begin at a byte."""
        return self.read_parts(dtype, [(first_byte, count)])[0]

    def read_parts(self, dtype: np.dtype[Any], parts: Sequence[tuple[int, int]]) -> list[NDArray[Any]]:
        """Read several parts of the file: the first byte of each, and its number of values of `dtype`."""
        with chunk_errors(self.path), self.local.open("rb") as file:
            if len(parts) > 1:
                _announce(file.fileno(), parts, dtype.itemsize)
            return [self._read_part(file, dtype, *part) for part in parts]

    def _read_part(self, file: BinaryIO, dtype: np.dtype[Any], first_byte: int, count: int) -> NDArray[Any]:
        values = np.empty(count, dtype)
        file.seek(first_byte)
        if file.readinto(values.view(np.uint8).data) < values.nbytes:  # type: ignore[attr-defined]  # of BufferedReader
            problem = f"the file ends, {first_byte + values.nbytes:,} bytes are needed"
            raise self.error_at(file.seek(0, os.SEEK_END), problem)
        return values

    def check_size(self, expected: int, reason: str) -> None:
        """The file must have `expected` bytes. The error says why: `reason`, and names the byte where it differs."""
        if self.size != expected:
            raise self.error_at(min(self.size, expected), f"{reason}, the file has {self.size:,}")

    def error(self, problem: str) -> ChunkError:
        return ChunkError(self.path, None, problem)

    def error_at(self, byte: int, problem: str) -> ChunkError:
        return self.error(f"at byte {byte:,}, {problem}")


def _announce(descriptor: int, parts: Sequence[tuple[int, int]], itemsize: int) -> None:
    """Let the system fetch all parts at once, where it can, instead of one after another."""
    if hasattr(os, "posix_fadvise"):
        for first_byte, count in parts:
            os.posix_fadvise(descriptor, first_byte, count * itemsize, os.POSIX_FADV_WILLNEED)


def as_token_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Return a dtype of ints, or None. NumPy raises a TypeError if there is no such dtype."""
    found = None if dtype is None else np.dtype(dtype)
    if found is not None and found.kind not in "iu":
        raise ValueError(f"dtype must be a NumPy dtype of ints such as 'uint16', got {found}")
    return found


def fitting_dtype(documents: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    """The dtype of tokens that may have been read as those of a narrower one: every second value is then near 0."""
    tokens = np.concatenate(documents)
    counts, dtype = np.array(list(map(len, documents))), tokens.dtype
    while dtype.itemsize < 8 and len(tokens) and not (counts % 2).any():
        lower, upper = tokens.astype(f"i{dtype.itemsize}").astype(np.int64).reshape(-1, 2).T
        upper = upper + (upper < 0)  # the upper half of a small negative number, such as an ignored label, is -1
        filled = (lower != 0) | (upper != 0)  # other pairs are padding, or the upper halves of int64
        if counts.max() == 2 and len(np.unique(upper[filled])) == 1 and upper.any():  # a token and an end in each
            break
        if 2 * np.count_nonzero(np.abs(lower) > 256 * np.abs(upper).max()) <= np.count_nonzero(filled):
            break
        dtype = np.dtype(f"i{2 * dtype.itemsize}")
        tokens, counts = tokens.view(dtype), counts // 2
    return dtype
