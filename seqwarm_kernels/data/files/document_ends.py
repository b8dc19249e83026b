"""Where documents end in a flat array of tokens: given, or found by the token between them and kept in a file."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from ...utils.progress import standard_error
from ..batch_planning.plan import IntArray
from .reader import ChunkError, reason_of
from .remote import AnyPath, check_location, is_path, write_file
from .token_arrays import TokenArray
from .transfers import read_ahead

_TOKENS_PER_READ = 2**21  #: few enough to stay in a processor's cache while they are searched
_THREADS = 2  #: one reads while the other searches


class Separator(NamedTuple):
    """The token that every document has at its end or at its start. It belongs to the document."""

    name: str  #: "end_token" or "start_token"
    token: int


def found_boundaries(array: TokenArray, separator: Separator, index_folder: AnyPath | None) -> IntArray:
    """Find the documents of an array, (documents + 1,) int64. The whole file is read the first time.

    The lengths of the documents are kept in a file, in `index_folder` or beside the array's. It counts as long as size
    and time of change of the array's file are the same.
    """
    path = _index_path(array.file.local, separator, index_folder)
    facts = array.file.local.stat()
    made_from = json.dumps(
        [facts.st_size, facts.st_mtime_ns, array.dtype.str, array.first_byte, array.tokens, *separator]
    )
    boundaries = _kept(path, made_from)
    if boundaries is None:
        boundaries = _search(array, separator)
        lengths, buffer = np.diff(boundaries), io.BytesIO()
        np.savez(buffer, made_from=np.array(made_from), lengths=lengths.astype(np.min_scalar_type(lengths.max())))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, buffer.getvalue())
    return boundaries


def given_boundaries(array: TokenArray, ends: object) -> IntArray:
    """The boundaries of documents that end at `ends`: ints, or the path or URL of a .npy file of them."""
    found = np.asarray(_load_ends(check_location("document_ends", ends)) if is_path(ends) else ends)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(f"document_ends must be ints in one dimension, got {found.dtype} of shape {found.shape}")
    boundaries = np.append(0, found.astype(np.int64))
    if (np.diff(boundaries) < 0).any():
        raise ValueError(f"document_ends must not decrease, those of {array.file.path} do")
    if boundaries[-1] != array.tokens:
        raise ValueError(
            f"document_ends must end with {array.tokens}, the tokens of {array.file.path}, got {boundaries[-1]}"
        )
    return boundaries


def _load_ends(path: AnyPath) -> Any:
    try:
        return np.lib.format.read_array(io.BytesIO(path.read_bytes()))
    except Exception as error:  # NumPy raises errors of many types for a damaged header
        raise ChunkError(path, None, f"document_ends cannot be read: {reason_of(error)}") from error


def _search(array: TokenArray, separator: Separator) -> IntArray:
    def found(first: int) -> IntArray:
        count = min(_TOKENS_PER_READ, array.tokens - first)
        tokens = array.file.read(array.dtype, array.first_byte + first * array.dtype.itemsize, count)
        return np.flatnonzero(tokens == separator.token) + (first + int(separator.name == "end_token"))

    firsts, title = range(0, array.tokens, _TOKENS_PER_READ), f"find documents in {array.file.path.name}"
    reads = read_ahead(found, firsts, _THREADS)
    bar = tqdm(reads, title, len(firsts), unit=" reads", disable=None, leave=False, file=standard_error())
    boundaries = np.concatenate([[0], *bar, [array.tokens]])
    if len(boundaries) == 2:
        raise array.file.error(
            f"token {separator.token} is not among the {array.tokens:,} tokens of {array.dtype}: "
            f"{separator.name} or dtype must be another one"
        )
    return boundaries[np.append(True, np.diff(boundaries) > 0)]  # 0 and the end may stand twice


def _index_path(path: Path, separator: Separator, index_folder: AnyPath | None) -> AnyPath:
    name = f"{path.name}.{separator.name}-{separator.token}.npz"
    if index_folder is None:
        return path.with_name(name)
    folder = hashlib.sha256(str(path.parent.resolve()).encode()).hexdigest()[:8]  # of files with the same name
    return index_folder / f"{folder}-{name}"


def _kept(path: AnyPath, made_from: str) -> IntArray | None:
    """The boundaries in a file, None if it is missing, damaged, or of an older file of tokens."""
    try:
        with np.load(io.BytesIO(path.read_bytes())) as entries:
            if str(entries["made_from"]) != made_from:
                return None
            lengths = entries["lengths"]
            boundaries = np.zeros(len(lengths) + 1, np.int64)
            boundaries[1:] = lengths  # NumPy adds numbers of one type faster
            return np.cumsum(boundaries, out=boundaries)
    except Exception:  # NumPy and zipfile, which compares checksums, raise errors of many types for a damaged file
        return None
