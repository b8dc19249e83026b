"""Write items into chunk files. Each file is written atomically, and an interrupted call can be repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from ...utils.checks import check_bool, check_choice, check_int, check_iterable
from ...utils.files import PARTIAL_SUFFIX
from .compression import COMPRESSIONS, READ_ERRORS, check_zstd, compress, read_uncompressed
from .lengths import LENGTHS_SUFFIX, has_lengths, lengths_path, write_lengths
from .manifest import CHUNK_FORMATS, CHUNK_PREFIX, MANIFEST, Chunk, Manifest
from .parquet import check_pyarrow
from .parquet_writer import write_parquet_chunk
from .reader import as_content, as_line
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
        folder: a folder, or a URL of fsspec such as s3://bucket/folder. Created if missing. It must not hold other
            files.
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
            lengths or settings, of more items, or is finished with fewer items.
    """
    check_iterable("items", items, "a list or another iterable of items")
    folder = check_location("folder", folder)
    items_per_chunk = check_int("items_per_chunk", items_per_chunk, minimum=1)
    check_bool("progress", progress)
    check_choice("format", format, CHUNK_FORMATS)
    check_choice("compression", compression, COMPRESSIONS)
    if length_fn is not None and not callable(length_fn):
        raise TypeError(f"length_fn must be a function of an item, got {type(length_fn).__name__}")
    if format == "parquet":
        check_pyarrow()
    elif compression == "zst":
        check_zstd()
    manifest = Manifest(format, compression, items_per_chunk, _name_of(length_fn))
    folder.mkdir(parents=True, exist_ok=True)
    writer = _Writer(folder, manifest, length_fn, _earlier_manifest(folder, manifest))
    with tqdm(items, desc="write_chunks", unit=" items", disable=None if progress else True) as bar:
        for item in bar:
            writer.add(item)
    return writer.finish()


def _name_of(length_fn: Callable[[Any], int] | None) -> str | None:
    return None if length_fn is None else getattr(length_fn, "__qualname__", type(length_fn).__qualname__)


def _earlier_manifest(folder: AnyPath, manifest: Manifest) -> Manifest | None:
    """The manifest of an earlier run. It must have the same settings, unless that run wrote no chunk: then None."""
    any_files = any(not path.name.endswith(PARTIAL_SUFFIX) for path in folder.iterdir())
    if not (folder / MANIFEST).exists():  # checked after the listing: a concurrent writer creates the manifest first
        if any_files:
            raise ValueError(f"folder must be empty or written by write_chunks, {folder} holds other files")
        return None
    existing = Manifest.read(folder)
    if existing == manifest:
        return existing
    if existing.chunks is None and not _has_chunks(folder):  # left over from a run that ended before its first chunk
        return None
    _check_settings(folder, existing, manifest)
    return existing


def _has_chunks(folder: AnyPath) -> bool:
    names = (path.name for path in folder.iterdir())
    return any(name.startswith(CHUNK_PREFIX) and not name.endswith((PARTIAL_SUFFIX, LENGTHS_SUFFIX)) for name in names)


def _check_settings(folder: AnyPath, existing: Manifest, manifest: Manifest) -> None:
    for name in ("format", "compression", "items_per_chunk", "length_fn"):
        if getattr(existing, name) != getattr(manifest, name):
            raise ValueError(
                f"folder {folder} holds chunks of another {name}: {getattr(existing, name)!r} there, "
                f"{getattr(manifest, name)!r} here; write these items into another folder"
            )


def _claim(folder: AnyPath, manifest: Manifest) -> None:
    """Write the settings before the first chunk, so that no other run can use different ones."""
    if _earlier_manifest(folder, manifest) is None:
        manifest.write(folder)


class _Writer:
    """Collects the items of a chunk, writes each full chunk, and the manifest at the end.

    Args:
        existing: the manifest of an earlier run.
    """

    def __init__(
        self, folder: AnyPath, manifest: Manifest, length_fn: Callable[[Any], int] | None, existing: Manifest | None
    ) -> None:
        self._folder, self._manifest, self._length_fn = folder, manifest, length_fn
        self._max_items = None if existing is None or existing.chunks is None else existing.items
        self._chunks: list[Chunk] = []
        self._pending_items: list[Any] = []
        self._pending_lines: list[bytes] = []
        self._blank_count = self._count = 0
        self._holds_text = True

    def add(self, item: Any) -> None:
        if self._manifest.format == "parquet":
            self._check_kind(item)
        line = b"" if self._manifest.format == "parquet" else as_line(item, self._manifest.format, self._count)
        self._count += 1
        if self._manifest.format == "text" and not item.strip():
            self._blank_count += 1
            return
        if self._count - self._blank_count - 1 == self._max_items:
            raise ValueError(
                f"folder {self._folder} is finished with {self._max_items} items, got more: "
                "write them into another folder"
            )
        self._pending_items.append(item)
        self._pending_lines.append(line)
        if len(self._pending_items) == self._manifest.items_per_chunk:
            self._write_chunk()

    def _check_kind(self, item: Any) -> None:
        """A Parquet column holds texts or lists of tokens, in all chunks."""
        if self._count == 0:
            self._holds_text = isinstance(item, str)
        elif isinstance(item, str) != self._holds_text:
            raise TypeError(
                "items must be all strings or all one-dimensional arrays or lists of ints for format 'parquet', got "
                f"{item!r:.60} as item {self._count}"
            )

    def _write_chunk(self) -> None:
        if not self._chunks:
            _claim(self._folder, self._manifest)
        path = self._folder / self._manifest.file_name(len(self._chunks))
        if self._manifest.format == "parquet":
            write_parquet_chunk(path, self._pending_items, self._manifest.compression, self._length_fn)
        else:
            self._write_lines(path)
        self._chunks.append(Chunk(path.name, len(self._pending_items), file_size(path)))
        self._pending_items, self._pending_lines = [], []

    def _write_lines(self, path: AnyPath) -> None:
        items, content = self._pending_items, as_content(self._pending_lines)
        exists, lengths = _has_content(path, content), lengths_path(path)
        # The lengths are written first, so that a chunk that exists has its lengths.
        if self._length_fn is not None and not (exists and has_lengths(lengths, items, self._length_fn)):
            write_lengths(lengths, items, self._length_fn)
        if not exists:
            write_file(path, compress(content, self._manifest.compression))

    def finish(self) -> Manifest:
        if self._pending_items:
            self._write_chunk()
        if not self._chunks:
            raise ValueError(
                f"items must hold at least one that is not blank, got {self._count} items, {self._blank_count} blank"
            )
        surplus = self._folder / self._manifest.file_name(len(self._chunks))
        if surplus.exists():
            raise ValueError(f"{surplus} comes after the last of these items: the folder holds chunks of other items")
        # Another run may have claimed the folder before the first chunk of this one was there.
        _check_settings(self._folder, Manifest.read(self._folder), self._manifest)
        manifest = replace(self._manifest, chunks=tuple(self._chunks), blank_items=self._blank_count)
        manifest.write(self._folder)
        return manifest


def _has_content(path: AnyPath, content: bytes) -> bool:
    """Whether the file exists with this content. False for a damaged file, which is written again."""
    if not path.exists():
        return False
    try:
        existing = read_uncompressed(path)
    except READ_ERRORS:
        return False
    if existing != content:
        raise ValueError(f"{path} holds other items than these; write them into another folder")
    return True
