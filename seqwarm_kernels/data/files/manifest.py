"""The manifest of a folder of chunk files, and the lengths of the items, in a file beside each chunk."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.checks import check_int
from ...utils.files import write_atomically
from .compression import COMPRESSIONS
from .reader import FORMATS, ChunkError

MANIFEST = "manifest.json"

_LENGTHS_SUFFIX = ".lengths.npy"
_MAX_LENGTH = int(np.iinfo(np.uint32).max)
#: Number of items per chunk whose lengths are counted again to verify existing lengths.
_SPOT_CHECKS = 3


@dataclass(frozen=True)
class Chunk:
    file: str
    items: int
    bytes: int  #: size of the file on disk


@dataclass(frozen=True)
class Manifest:
    """Contents of a folder of chunk files.

    The manifest is written twice: without chunks before the first chunk file, and again once all chunks are written.
    """

    format: str
    compression: str
    items_per_chunk: int
    length_fn: str | None  #: name of the function that counted the lengths, None without lengths
    chunks: tuple[Chunk, ...] | None = None  #: None until all are written
    blank_items: int = 0  #: number of blank items that were left out

    @property
    def items(self) -> int:
        return sum(chunk.items for chunk in self.chunks or ())

    def file_name(self, number: int) -> str:
        return f"chunk-{number:06d}{FORMATS[self.format]}{COMPRESSIONS[self.compression]}"

    def write(self, folder: Path) -> None:
        write_atomically(folder / MANIFEST, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest of `folder`.

        Raises:
            ValueError: The manifest is missing or invalid.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            chunks = content.pop("chunks")
            manifest = Manifest(**content, chunks=None if chunks is None else tuple(Chunk(**chunk) for chunk in chunks))
            manifest._check()
            return manifest
        except FileNotFoundError as error:
            raise ValueError(
                f"{folder} has no {MANIFEST}: it is not a folder of write_chunks. Pass its .txt or .jsonl files as a "
                "list, or write their items with write_chunks first"
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ChunkError(path, None, f"invalid manifest: {error}") from error

    def _check(self) -> None:
        """Check every entry, of a file that may have been damaged."""
        for name, value, known in (("format", self.format, FORMATS), ("compression", self.compression, COMPRESSIONS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        check_int("items_per_chunk", self.items_per_chunk, minimum=1)
        check_int("blank_items", self.blank_items, minimum=0)
        if not isinstance(self.length_fn, (str, type(None))):
            raise TypeError(f"length_fn must be a string or null, got {self.length_fn!r}")
        if self.chunks is not None and not self.chunks:
            raise ValueError("chunks must be null or at least one chunk, got none")
        for number, chunk in enumerate(self.chunks or ()):
            if chunk.file != self.file_name(number):
                raise ValueError(f"file of chunk {number} must be {self.file_name(number)!r}, got {chunk.file!r}")
            check_int(f"items of {chunk.file}", chunk.items, minimum=1)
            check_int(f"bytes of {chunk.file}", chunk.bytes, minimum=1)

    def lengths(self, folder: Path) -> NDArray[np.int64]:
        """Read the lengths of all items, in the order of the chunks.

        Returns:
            (items,) int64.

        Raises:
            ValueError: The folder has no lengths, or the lengths of a chunk are missing or invalid.
        """
        if self.length_fn is None:
            raise ValueError(f"{folder} has no lengths: call write_chunks with length_fn")
        parts = [read_lengths(folder / chunk.file, chunk.items) for chunk in self.chunks or ()]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def read_lengths(chunk_path: Path, items: int) -> NDArray[np.int64]:
    """Read the lengths of one chunk.

    Args:
        chunk_path: the chunk file.
        items: number of items in the chunk.

    Returns:
        (items,) int64.

    Raises:
        ChunkError: The lengths are missing or invalid.
    """
    path = _lengths_path(chunk_path)
    try:
        lengths = np.load(path)
    except Exception as error:  # NumPy raises errors of many types for a damaged header
        raise ChunkError(path, None, f"cannot be read: {error}") from error
    if lengths.shape != (items,):
        raise ChunkError(
            path, None, f"lengths must have shape ({items},), one for each item of the chunk, got {lengths.shape}"
        )
    if lengths.dtype.kind not in "iu" or lengths.min(initial=0) < 0:
        raise ChunkError(path, None, f"lengths must be ints of at least 0, got {lengths.dtype}")
    return lengths.astype(np.int64)


def write_lengths(chunk_path: Path, items: list[Any], length_fn: Callable[[Any], int]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([_length(length_fn, item) for item in items], dtype=np.uint32))
    write_atomically(_lengths_path(chunk_path), buffer.getvalue())


def has_lengths(chunk_path: Path, items: list[Any], length_fn: Callable[[Any], int]) -> bool:
    """Whether the chunk has valid lengths. The lengths of a few items are compared with `length_fn`.

    Raises:
        ValueError: `length_fn` returns another length than the one stored.
    """
    try:
        lengths = read_lengths(chunk_path, len(items))
    except ChunkError:
        return False
    for index in sorted({(len(items) - 1) * part // (_SPOT_CHECKS - 1) for part in range(_SPOT_CHECKS)}):
        item = items[index]
        stored, counted = int(lengths[index]), _length(length_fn, item)
        if stored != counted:
            raise ValueError(
                f"length_fn must count as the function that wrote {_lengths_path(chunk_path)}: got {counted} tokens "
                f"instead of {stored} for {item!r:.60}; write these items into another folder"
            )
    return True


def _length(length_fn: Callable[[Any], int], item: Any) -> int:
    length = length_fn(item)
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or not 0 <= length <= _MAX_LENGTH:
        raise ValueError(f"length_fn must return an int from 0 to {_MAX_LENGTH}, got {length!r} for {item!r:.60}")
    return int(length)


def _lengths_path(chunk_path: Path) -> Path:
    return chunk_path.with_name(chunk_path.name.partition(".")[0] + _LENGTHS_SUFFIX)
