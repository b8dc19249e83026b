"""Lengths of a chunk's items, in a file beside it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...utils.files import write_atomically
from .manifest import lengths_file, read_lengths
from .reader import ChunkError

#: Items of a chunk that are counted again.
_LOOKED_AT = 3
_LONGEST = int(np.iinfo(np.uint32).max)


def has_lengths(chunk_path: Path, items: list[Any], length_fn: Callable[[Any], int]) -> bool:
    """Whether they are there, whole, and what `length_fn` counts, as far as a few of them tell.

    Raises:
        ValueError: it counts otherwise.
    """
    try:
        lengths = read_lengths(chunk_path, len(items))
    except ChunkError:
        return False
    for place in sorted({(len(items) - 1) * part // (_LOOKED_AT - 1) for part in range(_LOOKED_AT)}):
        item = items[place]
        there, here = int(lengths[place]), _counted(length_fn, item)
        if there != here:
            raise ValueError(
                f"length_fn counts otherwise than what counted {_path(chunk_path)}: "
                f"{here} tokens, {there} there, for {_shown(item)}; write these items into another folder"
            )
    return True


def write_lengths(chunk_path: Path, items: list[Any], length_fn: Callable[[Any], int]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([_counted(length_fn, item) for item in items], dtype=np.uint32))
    write_atomically(_path(chunk_path), buffer.getvalue())


def _counted(length_fn: Callable[[Any], int], item: Any) -> int:
    length = length_fn(item)
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or not 0 <= length <= _LONGEST:
        raise ValueError(f"length_fn must return an int from 0 to {_LONGEST}, got {length!r} for {_shown(item)}")
    return int(length)


def _shown(item: Any) -> str:
    return f"{item!r:.60}"


def _path(chunk_path: Path) -> Path:
    return chunk_path.with_name(lengths_file(chunk_path.name))
