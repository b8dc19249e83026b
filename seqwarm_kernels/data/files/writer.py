"""Write items into chunk files. Each file is written atomically, and an interrupted call can be repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from tqdm import tqdm

from ...utils.checks import check_choice, check_int
from ...utils.progress import standard_error
from .compression import COMPRESSIONS, compress, read_uncompressed
from .lengths import as_lengths, has_lengths, lengths_path
from .manifest import CHUNK_FORMATS, MANIFEST, Chunk, Manifest
from .parquet import check_pyarrow
from .parquet_writer import as_parquet, column_of, has_parquet_items
from .reader import as_content
from .remote import AnyPath, PathLike, check_location, file_size, write_file


def write_chunks(
    items: Iterable[Any],
    folder: PathLike,
    items_per_chunk: int = 10_000,
    *,
    format: str = "text",
    compression: str = "gz",
    length_fn: Callable[[Any], int] | None = None,
    progress: bool = True,
) -> Manifest:
    """Write `items` into files of `items_per_chunk` items each, in order, and a manifest.json.

    After an interruption, call the function again with the same items. Existing files are compared and not written
    again, and the lengths of a few of their items are counted again and compared. Damaged files are written again.
    Several processes may write the same items into one folder at once. One chunk at a time is in memory. A call that
    raises an error before its first chunk may be repeated with other settings.

    Args:
        items: strings of one line for "text", JSON-serializable values for "jsonl", strings or lists or arrays of ints
            for "parquet". Blank strings are left out of text.
        folder: a folder, or a URL of fsspec such as s3://bucket/folder. Created if missing.
        items_per_chunk: number of items in each file. The last file may have fewer.
        format: "text", one item a line, "jsonl", or "parquet" (needs pyarrow), which `ParquetSource` and other
            libraries read: one row group a file, of a column "text" or "input_ids".
        compression: "gz", "zst" (needs Python 3.14 or the package backports.zstd, except for Parquet) or "none".
        length_fn: counts an item's tokens. The lengths are stored beside each chunk, in Parquet in a column "length",
            so that planning needs no tokenizer.
        progress: show a progress bar if standard error is a terminal.

    Returns:
        The manifest.

    Raises:
        TypeError: an argument has the wrong type, or an item has a type that cannot be written.
        ValueError: `items` is empty or holds an item that cannot be written, or the folder holds chunks of other items,
            lengths or settings, or of more items.
    """
    if isinstance(items, (str, bytes, Mapping)):  # would be written letter by letter, or without the values
        raise TypeError(f"items must be a list or another iterable of items, got {type(items).__name__}")
    folder = check_location("folder", folder)
    items_per_chunk = check_int("items_per_chunk", items_per_chunk, minimum=1)
    check_choice("format", format, CHUNK_FORMATS)
    check_choice("compression", compression, COMPRESSIONS)
    if format == "parquet":
        check_pyarrow()
    name = None if length_fn is None else getattr(length_fn, "__qualname__", type(length_fn).__qualname__)
    writer = _Writer(folder, Manifest(format, compression, items_per_chunk, name), length_fn)
    folder.mkdir(parents=True, exist_ok=True)
    writer.check_settings()
    disable = None if progress else True
    with tqdm(items, desc="write_chunks", unit=" items", disable=disable, file=standard_error()) as bar:
        kept = (item for item in bar if format != "text" or not isinstance(item, str) or item.strip())
        while chunk := list(islice(kept, items_per_chunk)):
            writer.write(chunk)
            del chunk  # one is in memory
    return writer.finish()


class _Writer:
    """Writes chunk after chunk, and the manifest at the end."""

    def __init__(self, folder: AnyPath, manifest: Manifest, length_fn: Callable[[Any], int] | None) -> None:
        self._folder, self._manifest, self._length_fn = folder, manifest, length_fn
        self._chunks: list[Chunk] = []
        self._column: str | None = None  #: of the items, in Parquet: that of the first item
        self._finished: int | None = None  #: number of chunks of an earlier run that ended

    def check_settings(self) -> bool:
        """Whether another run has begun to write the folder. It must have the same settings."""
        if not (self._folder / MANIFEST).exists():
            return False
        existing = Manifest.read(self._folder)
        for name in ("format", "compression", "items_per_chunk", "length_fn"):
            there, here = getattr(existing, name), getattr(self._manifest, name)
            if there != here:
                raise ValueError(
                    f"folder {self._folder} holds chunks of another {name}: {there!r} there, {here!r} here"
                )
        self._finished = None if existing.chunks is None else len(existing.chunks)
        return True

    def write(self, items: list[Any]) -> None:
        if len(self._chunks) == self._finished:  # states of its sources would be refused
            raise ValueError(f"folder {self._folder} is finished with fewer items: write these into another folder")
        path = self._folder / self._manifest.file_name(len(self._chunks))
        contents = self._missing_files(path, items)
        # The settings are written before the first chunk, so that no other run can use different ones.
        if not self._chunks and not self.check_settings():
            self._manifest.write(self._folder)
        for file, content in contents.items():
            write_file(file, content)
        self._chunks.append(Chunk(path.name, len(items), file_size(path)))

    def _missing_files(self, path: AnyPath, items: list[Any]) -> dict[AnyPath, bytes]:
        """The files of a chunk that are missing or damaged. Lengths come first: a chunk that exists has its lengths."""
        compression, length_fn = self._manifest.compression, self._length_fn
        if self._manifest.format == "parquet":
            column = self._column = self._column or column_of(items[0])
            exists = has_parquet_items(path, items, column, length_fn)
            return {} if exists else {path: as_parquet(items, column, compression, length_fn)}
        content, contents = as_content(items, self._manifest.format), {}
        exists, lengths = _has_content(path, content), lengths_path(path)
        if length_fn is not None and not (exists and has_lengths(lengths, items, length_fn)):
            contents[lengths] = as_lengths(items, length_fn)
        return contents if exists else {**contents, path: compress(content, compression)}

    def finish(self) -> Manifest:
        if not self._chunks:
            raise ValueError("items must hold at least one that is not blank, got none")
        surplus = self._folder / self._manifest.file_name(len(self._chunks))
        if surplus.exists():
            raise ValueError(f"{surplus} comes after the last of these items: the folder holds chunks of other items")
        manifest = replace(self._manifest, chunks=tuple(self._chunks))
        manifest.write(self._folder)
        return manifest


def _has_content(path: AnyPath, content: bytes) -> bool:
    """Whether the file has this content. False if it is missing or damaged: it is then written again."""
    try:
        existing = read_uncompressed(path)
    except OSError:
        return False
    if existing != content:
        raise ValueError(f"{path} holds other items than these; write them into another folder")
    return True
