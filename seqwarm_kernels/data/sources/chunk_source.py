"""A source over chunk files, shuffled by file and inside buffers of files."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ..batch_planning.plan import IntArray
from ..files.lengths import lengths_path, read_lengths
from ..files.manifest import Manifest
from ..files.reader import chunk_errors, format_of, read_chunk
from ..files.remote import AnyPath, PathLike, file_size, is_path
from .base import check_locations, fingerprint
from .chunked_source import ChunkedSource

_THREADS = 16


class _File(NamedTuple):
    path: AnyPath
    items: int | None  #: None: known when it is read
    bytes: int | None  #: None: the file cannot be reached


class ChunkSource(ChunkedSource):
    """The items of chunk files. The files are shuffled, and the items inside each buffer of `buffer_chunks` files.

    Restoring reads the files of one buffer. The ranks read different files. The number of files per rank differs by at
    most one.

    Args:
        paths: a folder of `write_chunks`, or files in order: .txt or .jsonl, optionally followed by .gz or .zst. Each
            path may be a URL of fsspec, such as s3://bucket/folder; such files are read ahead, one buffer at most. Each
            file is read as a whole. Blank lines and a byte-order mark are skipped.
        buffer_chunks: number of files that are in memory together and whose items are mixed. A larger buffer mixes
            further. Restoring reads this many files.
        with_lengths: yield (item, length) with the lengths stored by `write_chunks`.
        on_error: what to do if a file is missing, damaged, truncated, empty, differs from its manifest, or, in a list
            of files, has another size than when the source was made. "raise" raises a `ChunkError`. "skip" skips the
            file with a warning and records the reason in `skipped`. A state counts the items that could be read. Do not
            repair a file that was skipped in the open buffer before the state is restored: the position would shift.
            For a list of files, a state is rejected if the size of a file has changed. For a folder of `write_chunks`,
            such a change is not detected.
        order: the options of `Order`.

    Raises:
        ValueError: `paths` has fewer files than ranks, no files, a file twice, a file with another suffix, a missing
            folder, a folder without a finished manifest, or no lengths for `with_lengths`; or a setting is out of
            range.
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
        self._files = _find(paths, with_lengths)
        super().__init__(
            buffer_chunks=buffer_chunks,
            with_lengths=with_lengths,
            on_error=on_error,
            num_chunks=len(self._files),
            reads_ahead=not all(isinstance(file.path, Path) for file in self._files),
            **order,
        )
        # The names and sizes of the files: the folder may be moved, and no file is read.
        self._fingerprint = fingerprint([(file.path.name, file.items, file.bytes) for file in self._files])

    def lengths(self) -> IntArray:
        """The lengths that `write_chunks` stored, of all ranks, in the order of the files, (items,) int64.

        Raises:
            ValueError: `paths` is not a folder of `write_chunks` with lengths.
        """
        first = self._files[0]
        if first.items is None:
            raise ValueError(f"lengths need a folder of write_chunks, {first.path} is a file")
        return Manifest.read(first.path.parent).lengths(first.path.parent)

    def _load(self, chunk: int) -> list[Any]:
        file = self._files[chunk]
        items = read_chunk(file.path, file.items, file.bytes)
        if not self.with_lengths:
            return items
        lengths = read_lengths(lengths_path(file.path), len(items))
        return list(zip(items, lengths.tolist(), strict=True))

    def _name_of(self, chunk: int) -> str:
        return str(self._files[chunk].path)

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "files": self._fingerprint}


def _find(paths: PathLike | Iterable[PathLike], with_lengths: bool) -> list[_File]:
    found = check_locations("paths", paths, "a folder of write_chunks, or files")
    with chunk_errors(found[0]):
        is_missing, is_folder = is_path(paths) and not found[0].exists(), len(found) == 1 and found[0].is_dir()
    if is_missing:
        raise ValueError(f"paths must exist, got {str(found[0])!r}: no such file or folder")
    if is_folder:
        return _in_folder(found[0], with_lengths)
    if with_lengths:
        raise ValueError(f"with_lengths needs a folder of write_chunks, got {found[0]}")
    for path in found:
        format_of(path)
    with ThreadPoolExecutor(_THREADS) as pool:  # a store answers many questions at once
        return [_File(path, None, size) for path, size in zip(found, pool.map(_size, found), strict=True)]


def _in_folder(folder: AnyPath, with_lengths: bool) -> list[_File]:
    manifest = Manifest.read(folder)
    if manifest.format == "parquet":
        raise ValueError(f"{folder} holds Parquet files: use ParquetSource")
    if manifest.chunks is None:
        raise ValueError(f"write_chunks has not finished {folder}: call it again with the same items")
    if with_lengths and manifest.length_fn is None:
        raise ValueError(f"with_lengths needs lengths, {folder} has none: call write_chunks with length_fn")
    return [_File(folder / chunk.file, chunk.items, chunk.bytes) for chunk in manifest.chunks]


def _size(path: AnyPath) -> int | None:
    try:
        return file_size(path)
    except OSError:  # a missing file may be skipped when it is read
        return None
