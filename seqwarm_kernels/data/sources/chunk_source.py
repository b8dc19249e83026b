"""A source over chunk files, shuffled by file and inside buffers of files."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ..batch_planning.plan import IntArray
from ..files.lengths import lengths_path, read_lengths
from ..files.manifest import Manifest
from ..files.reader import chunk_errors, format_of, read_chunk
from ..files.remote import AnyPath, PathLike, file_size
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
        super().__init__(buffer_chunks=buffer_chunks, with_lengths=with_lengths, on_error=on_error, **order)
        found = check_locations("paths", paths, "a folder of write_chunks, or files")
        with chunk_errors(found[0]):
            if len(found) == 1 and not found[0].exists():
                raise ValueError(f"paths must exist, got {str(found[0])!r}: no such file or folder")
            is_folder = len(found) == 1 and found[0].is_dir()
        manifest = _finished_manifest(found[0]) if is_folder else None
        self._has_lengths = manifest is not None and manifest.length_fn is not None
        files = _files(found) if manifest is None else _files_in(found[0], manifest)
        self._set_chunks(files, found)
        # The names and sizes of the files: the folder may be moved, and no file is read.
        self._fingerprint = fingerprint([(file.path.name, file.items, file.bytes) for file in files])

    def _check_has_lengths(self) -> None:
        if not self._has_lengths:
            raise ValueError(f"lengths need a folder of write_chunks with length_fn, got {self._chunks[0].path}")

    def _items(self, chunk: _File) -> list[Any]:
        return read_chunk(chunk.path, chunk.items, chunk.bytes)

    def _lengths(self, chunk: _File) -> IntArray:
        assert chunk.items is not None
        return read_lengths(lengths_path(chunk.path), chunk.items)

    def _name_of(self, chunk: _File) -> str:
        return str(chunk.path)

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "files": self._fingerprint}


def _finished_manifest(folder: AnyPath) -> Manifest:
    manifest = Manifest.read(folder)
    if manifest.format == "parquet":
        raise ValueError(f"{folder} holds Parquet files: use ParquetSource")
    if manifest.chunks is None:
        raise ValueError(f"write_chunks has not finished {folder}: call it again with the same items")
    return manifest


def _files_in(folder: AnyPath, manifest: Manifest) -> list[_File]:
    return [_File(folder / chunk.file, chunk.items, chunk.bytes) for chunk in manifest.chunks or ()]


def _files(paths: list[AnyPath]) -> list[_File]:
    for path in paths:
        format_of(path)
    with ThreadPoolExecutor(_THREADS) as pool:  # a store answers many questions at once
        return [_File(path, None, size) for path, size in zip(paths, pool.map(_size, paths), strict=True)]


def _size(path: AnyPath) -> int | None:
    try:
        return file_size(path)
    except OSError:  # a missing file may be skipped when it is read
        return None
