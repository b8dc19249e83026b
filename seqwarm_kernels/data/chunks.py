"""Items into chunk files: each is there whole or not at all, and what is there is not written again."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..checks import check_int
from ..files import PARTIAL_SUFFIX, write_atomically
from .chunk_files import FORMATS, as_line
from .compression import COMPRESSIONS, READ_ERRORS, compress, read_uncompressed, zstandard
from .manifest import MANIFEST, Chunk, Manifest, lengths_file


def write_chunks(
    items: Iterable[Any],
    folder: str | os.PathLike[str],
    items_per_chunk: int = 10_000,
    *,
    format: str = "text",
    compression: str = "gz",
    length_fn: Callable[[Any], int] | None = None,
    lengths_of: str | None = None,
    progress: bool = True,
) -> Manifest:
    """Write `items` into files of `items_per_chunk`, in their order, and a manifest.json.

    Call it again with the same items after an interruption: files that are there are compared, not written, and
    their lengths are not counted again. One chunk at a time is in memory.

    Args:
        items: strings of one line for "text", what JSON can hold for "jsonl". Blank strings are left out of text.
        folder: is made if it is not there. Nothing else may be in it.
        items_per_chunk: the last file may have fewer.
        format: "text", one item a line, or "jsonl".
        compression: "gz", "zst" (needs the package zstandard) or "none".
        length_fn: counts an item's tokens. Lengths are kept beside each chunk, so that planning needs no tokeniser.
        lengths_of: a name for what `length_fn` counts; default: the function's own.
        progress: a bar, where standard error is a terminal.

    Raises:
        ValueError: the folder holds chunks of other items or settings; `items` has none, or one that cannot be written.
        TypeError: an item is of a type that cannot be written.
    """
    check_int("items_per_chunk", items_per_chunk, minimum=1)
    for name, value, known in (("format", format, FORMATS), ("compression", compression, COMPRESSIONS)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if length_fn is not None and not callable(length_fn):
        raise TypeError(f"length_fn must be a function of an item, got {type(length_fn).__name__}")
    if compression == "zst":
        zstandard()
    if length_fn is not None and lengths_of is None:
        lengths_of = getattr(length_fn, "__qualname__", type(length_fn).__qualname__)
    folder = Path(folder)
    manifest = Manifest(format, compression, items_per_chunk, lengths_of if length_fn is not None else None)
    _begin(folder, manifest)
    writer = _Writer(folder, manifest, length_fn)
    with tqdm(items, desc="write_chunks", unit=" items", disable=None if progress else True) as bar:
        for item in bar:
            writer.add(item)
    return writer.finish()


def _begin(folder: Path, manifest: Manifest) -> None:
    """The settings are written first, so that no run goes on with other ones."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        there = Manifest.read(folder)
        for name in ("format", "compression", "items_per_chunk", "lengths_of"):
            if getattr(there, name) != getattr(manifest, name):
                raise ValueError(
                    f"folder {folder} holds chunks of another {name}: {getattr(there, name)!r} there, "
                    f"{getattr(manifest, name)!r} here"
                )
    elif any(not path.name.endswith(PARTIAL_SUFFIX) for path in folder.iterdir()):
        raise ValueError(f"folder must be empty or of write_chunks, {folder} holds other files")
    else:
        manifest.write(folder)


class _Writer:
    def __init__(self, folder: Path, manifest: Manifest, length_fn: Callable[[Any], int] | None) -> None:
        self._folder, self._manifest, self._length_fn = folder, manifest, length_fn
        self._chunks: list[Chunk] = []
        self._open: list[Any] = []
        self._lines: list[bytes] = []
        self._blank = self._seen = 0

    def add(self, item: Any) -> None:
        line = as_line(item, self._manifest.format, self._seen)
        self._seen += 1
        if self._manifest.format == "text" and not item.strip():
            self._blank += 1
            return
        self._open.append(item)
        self._lines.append(line)
        if len(self._open) == self._manifest.items_per_chunk:
            self._write()

    def _write(self) -> None:
        path = self._folder / self._manifest.file_name(len(self._chunks))
        lengths = self._folder / lengths_file(path.name)
        content = b"".join(self._lines)
        if not _holds(path, content):
            lengths.unlink(missing_ok=True)
            write_atomically(path, compress(content, self._manifest.compression))
        if self._length_fn is not None and not lengths.exists():
            counted = [_checked_length(self._length_fn(item), item) for item in self._open]
            buffer = io.BytesIO()
            np.save(buffer, np.array(counted, dtype=np.uint32))
            write_atomically(lengths, buffer.getvalue())
        self._chunks.append(Chunk(path.name, len(self._open), path.stat().st_size))
        self._open, self._lines = [], []

    def finish(self) -> Manifest:
        if self._open:
            self._write()
        if not self._chunks:
            raise ValueError(f"items must hold one that is not blank, got {self._seen} items, {self._blank} blank")
        surplus = self._folder / self._manifest.file_name(len(self._chunks))
        if surplus.exists():
            raise ValueError(f"{surplus} is beyond the last of these items: the folder holds chunks of other items")
        manifest = replace(self._manifest, chunks=tuple(self._chunks), blank_items=self._blank)
        manifest.write(self._folder)
        return manifest


def _holds(path: Path, content: bytes) -> bool:
    """Whether the file is there and whole."""
    if not path.exists():
        return False
    try:
        there = read_uncompressed(path)
    except READ_ERRORS:
        return False  # damaged since: it is written again
    if there != content:
        raise ValueError(f"{path} holds other items than these; write them into another folder")
    return True


def _checked_length(length: Any, item: Any) -> int:
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 0:
        raise ValueError(f"length_fn must return an int of at least 0, got {length!r} for {item!r:.60}")
    return int(length)
