"""Sources that read their items in chunks: files of items here, row groups of Parquet files in `parquet_source`."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...utils.checks import check_choice, check_int
from ..batch_planning.plan import IntArray
from ..files.lengths import lengths_path, read_lengths
from ..files.manifest import Manifest
from ..files.reader import ChunkError, chunk_errors, format_of, read_chunk, reason_of
from ..files.remote import AnyPath, PathLike, file_size
from ..files.transfers import read_ahead
from .base import PartSource, check_locations, fingerprint


class ChunkedSource(PartSource):
    """Chunks in random order, and the items of each buffer of `buffer_chunks` chunks in random order.

    Chunks at URLs are read ahead, in threads and one buffer at most. A subclass passes its chunks to `_set_chunks`.

    Attributes:
        skipped: the reason for each chunk or file that was skipped so far.
    """

    def __init__(
        self, *, buffer_chunks: int = 1, with_lengths: bool = False, on_error: str = "raise", **order: Any
    ) -> None:
        super().__init__(**order)
        check_choice("on_error", on_error, ("raise", "skip"))
        self.buffer_chunks = check_int("buffer_chunks", buffer_chunks, minimum=1)
        self.with_lengths, self.on_error = with_lengths, on_error
        self.skipped: dict[str, str] = {}

    def _set_chunks(self, chunks: Sequence[Any], paths: Iterable[AnyPath], files: Sequence[object]) -> None:
        """The chunks of all ranks, in order, whose str is a key of `skipped`, their paths, and the facts of files."""
        if len(chunks) < self.world_size:
            raise ValueError(
                f"paths must hold a file or row group for each of {self.world_size} ranks, got {len(chunks)} in "
                f"{', '.join(map(str, paths))}"
            )
        self._chunks = chunks
        self._settings = {"buffer_chunks": self.buffer_chunks, "files": fingerprint(files)}
        self._set_parts(len(chunks), self.buffer_chunks, reads_ahead=not all(isinstance(path, Path) for path in paths))
        if self.with_lengths:
            self._check_has_lengths()

    @abstractmethod
    def _items(self, chunk: Any) -> list[Any]:
        """Read the items of a chunk, or raise a `ChunkError`. Several threads may call it."""

    @abstractmethod
    def _lengths(self, chunk: Any) -> IntArray:
        """Read the lengths of the items of a chunk, or raise a `ChunkError`. Several threads may call it."""

    @abstractmethod
    def _check_has_lengths(self) -> None:
        """Raise a ValueError if nothing tells the lengths."""

    def lengths(self) -> IntArray:
        """The number of tokens of each item of all ranks, in the order of the files, (items,) int64.

        The items are not read, unless they are lists of tokens without lengths.

        Raises:
            ValueError: There are no lengths, or those of a file are missing or cannot be read.
        """
        self._check_has_lengths()
        return np.concatenate([*read_ahead(self._lengths, self._chunks)])

    def _read(self, numbers: IntArray) -> list[Any]:
        chunks = [self._chunks[number] for number in numbers.tolist()]
        loaded = read_ahead(self._load, chunks, len(chunks)) if self._reads_ahead else map(self._load, chunks)
        return list(chain.from_iterable(loaded))

    def _load(self, chunk: Any) -> Iterable[Any]:
        try:
            items = self._items(chunk)
            return zip(items, self._lengths(chunk).tolist(), strict=True) if self.with_lengths else items
        except ChunkError as error:
            self._skip(error, str(chunk))
            return []

    def _skip(self, error: ChunkError, name: str | None = None) -> None:
        """Raise the error, or warn of it once and go on. `name` is that of what is skipped; None: that of the file."""
        name = name or str(error.path)
        if self.on_error == "raise":
            raise error
        if name not in self.skipped:
            warnings.warn(f"skipped: {error}", stacklevel=2)
        self.skipped[name] = str(error)


class _File(NamedTuple):
    path: AnyPath
    items: int | None  #: None: known when it is read
    bytes: int | None  #: None: the store does not report it
    has_lengths: bool = False

    def __str__(self) -> str:
        return str(self.path)


class ChunkSource(ChunkedSource):
    """The items of chunk files. The files are shuffled, and the items inside each buffer of `buffer_chunks` files.

    Restoring reads the files of one buffer. The ranks read different files. The number of files per rank differs by at
    most one.

    Args:
        paths: a folder of `write_chunks`, or files in order: .txt or .jsonl, optionally followed by .gz or .zst. Each
            path may be a URL of fsspec, such as s3://bucket/folder; such files are read ahead, one buffer at most. Each
            file is read as a whole. Blank lines and a byte-order mark are skipped. Only "\\n" ends a line: a file with
            "\\r\\n" gives items that end in "\\r".
        buffer_chunks: number of files that are in memory together and whose items are mixed.
        with_lengths: yield (item, length) with the lengths stored by `write_chunks`.
        on_error: what to do if a file is missing, damaged, truncated, empty, differs from its manifest, or, in a list
            of files, has another size than when the source was made. "raise" raises a `ChunkError`: for a missing file
            of a list when the source is made, else when the file is read. "skip" skips the file with a warning and
            records the reason in `skipped`. A state counts the items that could be read: do not repair a file that was
            skipped in the open buffer before the state is restored. A state is rejected if the size of a file in a list
            has changed, and not if one in a folder of `write_chunks` has.
        order: the options of `Order`.

    Raises:
        ValueError: there are fewer files than ranks, a file is named twice or has another suffix, a folder is missing
            or `write_chunks` has not finished it, or there are no lengths for `with_lengths`.
    """

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        *,
        buffer_chunks: int = 1,
        with_lengths: bool = False,
        on_error: str = "raise",
        **order: Any,
    ) -> None:
        super().__init__(buffer_chunks=buffer_chunks, with_lengths=with_lengths, on_error=on_error, **order)
        found = check_locations("paths", paths, "a folder of write_chunks, or files")
        with chunk_errors(found[0]):
            is_folder = len(found) == 1 and found[0].is_dir()
        files = _in_folder(found[0]) if is_folder else self._listed(found)
        # The names and sizes of the files: the folder may be moved, and no file is read.
        self._set_chunks(files, found, [(file.path.name, file.items, file.bytes) for file in files])

    def _listed(self, paths: list[AnyPath]) -> list[_File]:
        for path in paths:
            format_of(path)
        files = []
        for found in read_ahead(_found, paths):
            if isinstance(found, ChunkError):
                self._skip(found)
            else:
                files.append(found)
        return files

    def _check_has_lengths(self) -> None:
        if not self._chunks[0].has_lengths:
            raise ValueError(f"lengths need a folder of write_chunks with length_fn, got {self._chunks[0].path}")

    def _items(self, chunk: _File) -> list[Any]:
        return read_chunk(chunk.path, chunk.items, chunk.bytes)

    def _lengths(self, chunk: _File) -> IntArray:
        assert chunk.items is not None
        return read_lengths(lengths_path(chunk.path), chunk.items)


def _in_folder(folder: AnyPath) -> list[_File]:
    manifest = Manifest.read(folder)
    if manifest.format == "parquet":
        raise ValueError(f"{folder} holds Parquet files: use ParquetSource")
    has_lengths = manifest.length_fn is not None
    return [_File(folder / each.file, each.items, each.bytes, has_lengths) for each in manifest.finished(folder)]


def _found(path: AnyPath) -> _File | ChunkError:
    try:
        return _File(path, None, file_size(path))
    except FileNotFoundError as error:
        return ChunkError(path, None, f"cannot be read: {reason_of(error)}")
    except OSError:
        return _File(path, None, None)
