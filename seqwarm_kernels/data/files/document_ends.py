"""Where documents end in a flat array of tokens: given, or found by the token between them and kept in a file."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from ...utils.progress import standard_error
from ..batch_planning.plan import IntArray
from .reader import ChunkError, reason_of
from .remote import AnyPath, check_location, is_path, open_whole, write_file
from .token_arrays import TokenArray
from .transfers import read_ahead

_TOKENS_PER_READ = 2**21  #: few enough to stay in a processor's cache while they are searched
_THREADS = 2  #: one reads while the other searches


class Separator(NamedTuple):
    """The token that every document has at its end or at its start. It belongs to the document."""

    token: int
    at_end: bool

    @property
    def name(self) -> str:
        return "end_token" if self.at_end else "start_token"


def found_boundaries(array: TokenArray, separator: Separator, index_folder: AnyPath | None) -> IntArray:
    """Find the documents of an array, (documents + 1,) int64. The whole file is read the first time.

    The boundaries are kept in a file, which counts as long as size and time of change of the array's file are the same.

    Args:
        array: the tokens.
        separator: the token between documents.
        index_folder: where the boundaries are kept; None: beside the file.

    Raises:
        ChunkError: The file cannot be read, or the token does not occur.
        ValueError: The boundaries cannot be written.
    """
    path = _index_path(array.file.local, separator, index_folder)
    made_from = _made_from(array, separator)
    boundaries = _kept(path, made_from)
    if boundaries is None:
        boundaries = _search(array, separator)
        _keep(path, made_from, boundaries)
    return boundaries


def given_boundaries(array: TokenArray, ends: object) -> IntArray:
    """The boundaries of documents that end at `ends`: ints, or the path or URL of a .npy file of them.

    Raises:
        TypeError: `ends` are not ints in one dimension.
        ValueError: `ends` decrease, or the last one is not the number of tokens.
        ChunkError: The .npy file cannot be read.
    """
    found = np.asarray(_load_ends(check_location("document_ends", ends)) if is_path(ends) else ends)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(f"document_ends must be ints in one dimension, got {found.dtype} of shape {found.shape}")
    boundaries = np.append(0, found.astype(np.int64))
    if (np.diff(boundaries) < 0).any():
        raise ValueError(f"document_ends must not decrease, those of {array.file.path} do")
    if boundaries[-1] != array.tokens:
        raise ValueError(
            f"document_ends must end with the number of tokens, {array.tokens} in {array.file.path}, got "
            f"{boundaries[-1]}"
        )
    return boundaries


def _load_ends(path: AnyPath) -> Any:
    try:
        with open_whole(path) as file:
            return np.lib.format.read_array(file)
    except Exception as error:  # NumPy raises errors of many types for a damaged header
        raise ChunkError(path, None, f"document_ends cannot be read: {reason_of(error)}") from error


def _search(array: TokenArray, separator: Separator) -> IntArray:
    found = np.concatenate([*_positions(array, separator)])
    if not len(found):
        raise array.file.error(
            f"token {separator.token} is not among the {array.tokens:,} tokens of {array.dtype}: "
            f"{separator.name} or dtype must be another one"
        )
    boundaries = np.concatenate([[0], found, [array.tokens]])
    return boundaries[np.append(True, np.diff(boundaries) > 0)]  # 0 and the end may stand twice


def _positions(array: TokenArray, separator: Separator) -> Iterator[IntArray]:
    """The first tokens of documents, except that at 0, or the number of all tokens."""

    def found(first: int) -> tuple[int, IntArray]:
        count = min(_TOKENS_PER_READ, array.tokens - first)
        tokens = array.file.read(array.dtype, array.first_byte + first * array.dtype.itemsize, count)
        return count, np.flatnonzero(tokens == separator.token) + (first + int(separator.at_end))

    title, file = f"find documents in {array.file.path.name}", standard_error()
    with tqdm(
        total=array.tokens, desc=title, unit=" tokens", unit_scale=True, disable=None, leave=False, file=file
    ) as bar:
        for count, positions in read_ahead(found, range(0, array.tokens, _TOKENS_PER_READ), _THREADS):
            yield positions
            bar.update(count)


def _index_path(path: Path, separator: Separator, index_folder: AnyPath | None) -> AnyPath:
    name = f"{path.name}.{separator.name}-{separator.token}.npz"
    if index_folder is None:
        return path.with_name(name)
    folder = hashlib.sha256(str(path.parent.resolve()).encode()).hexdigest()[:8]  # of files with the same name
    return index_folder / f"{folder}-{name}"


def _made_from(array: TokenArray, separator: Separator) -> str:
    facts = array.file.local.stat()
    entries = [facts.st_size, facts.st_mtime_ns, array.dtype.str, array.first_byte, array.tokens, *separator]
    return json.dumps(entries)


def _kept(path: AnyPath, made_from: str) -> IntArray | None:
    """The boundaries in a file, None if it is missing, damaged, or of an older file of tokens."""
    try:
        with open_whole(path) as file, np.load(file) as entries:
            return entries["boundaries"] if str(entries["made_from"]) == made_from else None
    except Exception:  # NumPy and zipfile, which compares checksums, raise errors of many types for a damaged file
        return None


def _keep(path: AnyPath, made_from: str, boundaries: IntArray) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, made_from=np.array(made_from), boundaries=boundaries)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, buffer.getvalue())
    except OSError as error:
        raise ValueError(
            f"index_folder must be a folder that can be written, got {path.parent} ({reason_of(error)})"
        ) from error
