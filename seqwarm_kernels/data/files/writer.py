"""Items into chunk files: each is there whole or not at all, and what is there is not written again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...utils.checks import check_int
from ...utils.files import PARTIAL_SUFFIX, write_atomically
from .chunk_lengths import has_lengths, write_lengths
from .compression import COMPRESSIONS, READ_ERRORS, compress, read_uncompressed, zstandard
from .manifest import MANIFEST, Chunk, Manifest
from .reader import FORMATS, as_content, as_line


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
    their lengths are not counted again, but for a few of each to compare. What is damaged is written anew. Several
    processes may write the same items into one folder at once. One chunk at a time is in memory.

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
        ValueError: the folder holds chunks of other items, fewer items, other lengths or settings; `items` has none, or
            one that cannot be written.
        TypeError: `items` cannot be gone through, or an item is of a type that cannot be written.
    """
    _check_items(items)
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
    there = _begin(folder, manifest)
    writer = _Writer(folder, manifest, length_fn, there)
    with tqdm(items, desc="write_chunks", unit=" items", disable=None if progress else True) as bar:
        for item in bar:
            writer.add(item)
    return writer.finish()


def _check_items(items: Any) -> None:
    is_iterable = hasattr(type(items), "__iter__") or hasattr(type(items), "__getitem__")
    if not is_iterable or isinstance(items, (str, bytes, Mapping)):
        raise TypeError(f"items must be a list, a generator or the like of items, got {type(items).__name__}")


def _begin(folder: Path, manifest: Manifest) -> Manifest | None:
    """What another run left there. The settings are written first, so that no run goes on with other ones."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = [path for path in folder.iterdir() if not path.name.endswith(PARTIAL_SUFFIX)]
    if (folder / MANIFEST).exists():  # asked after the listing: who writes beside us makes it before all else
        there = Manifest.read(folder)
        for name in ("format", "compression", "items_per_chunk", "lengths_of"):
            if getattr(there, name) != getattr(manifest, name):
                raise ValueError(
                    f"folder {folder} holds chunks of another {name}: {getattr(there, name)!r} there, "
                    f"{getattr(manifest, name)!r} here"
                )
        return there
    if entries:
        raise ValueError(f"folder must be empty or of write_chunks, {folder} holds other files")
    manifest.write(folder)
    return None


class _Writer:
    """
    Args:
        there: the manifest that was there.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, length_fn: Callable[[Any], int] | None, there: Manifest | None
    ) -> None:
        self._folder, self._manifest, self._length_fn = folder, manifest, length_fn
        self._most = None if there is None or there.chunks is None else there.items
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
        if self._seen - self._blank - 1 == self._most:
            raise ValueError(
                f"folder {self._folder} is finished with {self._most} items, got more: write them into another folder"
            )
        self._open.append(item)
        self._lines.append(line)
        if len(self._open) == self._manifest.items_per_chunk:
            self._write()

    def _write(self) -> None:
        path = self._folder / self._manifest.file_name(len(self._chunks))
        content = as_content(self._lines)
        is_there = _holds(path, content)
        if self._length_fn is not None and not (is_there and has_lengths(path, self._open, self._length_fn)):
            write_lengths(path, self._open, self._length_fn)  # first: where the chunk is, its lengths are
        if not is_there:
            write_atomically(path, compress(content, self._manifest.compression))
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
