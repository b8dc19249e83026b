"""The lengths of the items of a file, in a file beside it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .reader import ChunkError, reason_of
from .remote import AnyPath, read_range

LENGTHS_SUFFIX = ".lengths.npy"
_HEADER = 128  #: bytes in front of one dimension of ints, as numpy.save writes it
MAX_LENGTH = int(np.iinfo(np.uint32).max)
#: Number of items per file whose lengths are counted again to verify existing lengths.
_SPOT_CHECKS = 3


def lengths_path(chunk_path: AnyPath) -> AnyPath:
    """The lengths of a chunk file."""
    return chunk_path.with_name(chunk_path.name.partition(".")[0] + LENGTHS_SUFFIX)


def read_lengths(path: AnyPath, items: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
    """Read the lengths of the items from `begin` to before `end` (None: to the last one), int64. No others are read.

    A `ChunkError` says if they are missing or damaged, or not those of this number of items.
    """
    end = items if end is None else end
    try:
        header = io.BytesIO(read_range(path, 0, _HEADER))
        np.lib.format.read_magic(header)
        shape, _, dtype = np.lib.format.read_array_header_1_0(header)
        offsets = (header.tell() + dtype.itemsize * index for index in (begin, end))
        lengths = np.frombuffer(read_range(path, *offsets), dtype)
    except Exception as error:  # NumPy raises errors of many types for a damaged header
        raise ChunkError(path, None, f"cannot be read: {reason_of(error)}") from error
    if shape != (items,) or len(lengths) != end - begin or dtype.kind not in "iu":
        raise ChunkError(path, None, f"must hold {items} lengths, one for each item, got {dtype} of shape {shape}")
    return lengths.astype(np.int64)


def as_lengths(items: Iterable[Any], length_fn: Callable[[Any], int]) -> bytes:
    """The content of a file of lengths."""
    buffer = io.BytesIO()
    np.save(buffer, np.array([count_length(length_fn, item) for item in items], dtype=np.uint32))
    return buffer.getvalue()


def has_lengths(path: AnyPath, items: Sequence[Any], length_fn: Callable[[Any], int]) -> bool:
    """Whether the file has the lengths. Those of a few items are compared with `length_fn`."""
    try:
        lengths = read_lengths(path, len(items))
    except ChunkError:
        return False
    check_lengths(path, items, lengths, length_fn)
    return True


def check_lengths(
    path: AnyPath, items: Sequence[Any], lengths: NDArray[np.int64], length_fn: Callable[[Any], int]
) -> None:
    """Count a few items of a file again, and compare them with its lengths."""
    for index in np.linspace(0, len(items) - 1, _SPOT_CHECKS).astype(int).tolist():
        stored, counted = int(lengths[index]), count_length(length_fn, items[index])
        if stored != counted:
            raise ValueError(
                f"length_fn must count as the function that wrote {path}: got {counted} tokens instead of {stored} for "
                f"{items[index]!r:.60}"
            )


def count_length(length_fn: Callable[[Any], int], item: Any, name: str = "length_fn") -> int:
    """Call `length_fn`, and check what it returns. `name` is that of the argument, for errors."""
    length = length_fn(item)
    if not isinstance(length, (int, np.integer)) or not 0 <= length <= MAX_LENGTH:
        raise ValueError(f"{name} must return an int from 0 to {MAX_LENGTH}, got {length!r} for {item!r:.60}")
    return int(length)
