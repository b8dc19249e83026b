"""A source over chunk files, shuffled by file and inside buffers of files."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...utils.checks import check_iterable
from ..batch_planning.plan import IntArray
from ..files.lengths import lengths_path, read_lengths
from ..files.manifest import Chunk, Manifest
from ..files.reader import chunk_errors, format_of, read_chunk
from ..files.remote import AnyPath, PathLike, RemotePath, check_location, check_named_once, file_size, is_path
from .base import fingerprint
from .chunked_source import NO_LENGTHS, ChunkedSource, LoadedChunk, check_settings

_THREADS = 16


class ChunkSource(ChunkedSource):
    """The items of chunk files. The files are shuffled, and the items inside each buffer of `buffer_chunks` files.

    Restoring reads the files of one buffer. The ranks read different files. The number of files per rank differs by at
    most one.

    Args:
        paths: a folder of `write_chunks`, or files in order: .txt or .jsonl, optionally followed by .gz or .zst. Each
            path may be a URL of fsspec, such as s3://bucket/folder; such files are read ahead, one buffer at most. Each
            file is read as a whole. Blank lines and a byte-order mark are skipped.
        seed: determines the order, together with the epoch.
        shuffle: shuffle the files and the items. False: keep the order of the files.
        buffer_chunks: number of files that are in memory together and whose items are mixed. A larger buffer mixes
            further. Restoring reads this many files.
        infinite: repeat epochs forever, each in its own order.
        rank, world_size: this process reads every world_size-th file of the epoch's order.
        with_lengths: yield (item, length) with the lengths stored by `write_chunks`.
        on_error: what to do if a file is missing, damaged, truncated, empty, differs from its manifest, or, in a list
            of files, has another size than when the source was made. "raise" raises a `ChunkError`. "skip" skips the
            file with a warning and records the reason in `skipped`. A state counts the items that could be read. Do not
            repair a file that was skipped in the open buffer before the state is restored: the position would shift.
            For a list of files, a state is rejected if the size of a file has changed. For a folder of `write_chunks`,
            such a change is not detected.

    Raises:
        TypeError: `paths` is neither a path nor a list of paths, or a setting has the wrong type.
        ValueError: `paths` has fewer files than ranks, no files, a file twice, a file with another suffix, a missing
            folder, a folder without a finished manifest, or no lengths for `with_lengths`; or a setting is out of
            range.
    """

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        *,
        seed: int = 0,
        shuffle: bool = True,
        buffer_chunks: int = 1,
        infinite: bool = False,
        rank: int = 0,
        world_size: int = 1,
        with_lengths: bool = False,
        on_error: str = "raise",
    ) -> None:
        buffer_chunks = check_settings(buffer_chunks, with_lengths, on_error)
        self._paths, self._chunks = _find(paths, with_lengths)
        super().__init__(
            seed=seed,
            shuffle=shuffle,
            infinite=infinite,
            rank=rank,
            world_size=world_size,
            buffer_chunks=buffer_chunks,
            with_lengths=with_lengths,
            on_error=on_error,
            num_chunks=len(self._paths),
            reads_ahead=any(isinstance(path, RemotePath) for path in self._paths),
        )
        if len(self._paths) < world_size:
            raise ValueError(
                f"paths must hold a file for each of {world_size} ranks, got {len(self._paths)}: write smaller chunks"
            )
        self._sizes = _sizes(self._paths, self._chunks)
        # The names and sizes of the files: the folder may be moved, and no file is read.
        self._fingerprint = fingerprint(
            [
                (path.name, None if chunk is None else chunk.items, size)
                for path, chunk, size in zip(self._paths, self._chunks, self._sizes, strict=True)
            ]
        )

    def lengths(self) -> IntArray:
        """The lengths that `write_chunks` stored, of all ranks, in the order of the files, (items,) int64.

        Raises:
            ValueError: `paths` is not a folder of `write_chunks` with lengths.
        """
        if self._chunks[0] is None:
            raise ValueError(f"lengths need a folder of write_chunks, {self._paths[0]} is a file")
        folder = self._paths[0].parent
        return Manifest.read(folder).lengths(folder)

    def _load(self, chunk: int) -> LoadedChunk:
        path, stored = self._paths[chunk], self._chunks[chunk]
        items = read_chunk(path, None if stored is None else stored.items, self._sizes[chunk])
        return LoadedChunk(items, read_lengths(lengths_path(path), len(items)) if self.with_lengths else NO_LENGTHS)

    def _name_of(self, chunk: int) -> str:
        return str(self._paths[chunk])

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "files": self._fingerprint}


def _find(paths: Any, with_lengths: bool) -> tuple[list[AnyPath], list[Chunk | None]]:
    if is_single := is_path(paths):
        path = check_location("paths", paths)
        with chunk_errors(path):
            exists, is_folder = path.exists(), path.is_dir()
        if not exists:
            raise ValueError(f"paths must exist, got {str(path)!r}: no such file or folder")
        if is_folder:
            return _in_folder(path, with_lengths)
    files = _checked_paths([paths] if is_single else paths)
    if with_lengths:
        raise ValueError(f"with_lengths needs a folder of write_chunks as paths, got {', '.join(map(str, files)):.80}")
    return files, [None] * len(files)


def _in_folder(folder: AnyPath, with_lengths: bool) -> tuple[list[AnyPath], list[Chunk | None]]:
    manifest = Manifest.read(folder)
    if manifest.format == "parquet":
        raise ValueError(
            f"paths must be a folder of text or JSON lines, {folder} holds Parquet files: use ParquetSource"
        )
    if manifest.chunks is None:
        raise ValueError(f"write_chunks has not finished {folder}: call it again with the same items")
    if with_lengths and manifest.length_fn is None:
        raise ValueError(f"with_lengths needs lengths, {folder} has none: call write_chunks with length_fn")
    return [folder / chunk.file for chunk in manifest.chunks], list(manifest.chunks)


def _checked_paths(paths: Any) -> list[AnyPath]:
    """Return the paths after checking them. A missing file is not an error here: it may be skipped when it is read."""
    wanted = "a folder of write_chunks, a file, or files"
    check_iterable("paths", paths, wanted)
    files = []
    for path in paths:
        file = check_location("each of paths", path)
        if not isinstance(file, RemotePath) and file.is_dir():  # a store would be asked once for each file
            raise ValueError(f"paths must be {wanted}, got the folder {file} among files")
        format_of(file)
        files.append(file)
    if not files:
        raise ValueError("paths must name at least one file, got none")
    check_named_once("paths", files, "file")
    return files


def _sizes(paths: list[AnyPath], chunks: list[Chunk | None]) -> list[int | None]:
    """The size of each file in bytes: from the manifest, else from the store. None if unknown."""
    with ThreadPoolExecutor(_THREADS) as pool:  # a store answers many questions at once
        unknown = pool.map(_size, [path for path, chunk in zip(paths, chunks, strict=True) if chunk is None])
        return [next(unknown) if chunk is None else chunk.bytes for chunk in chunks]


def _size(path: AnyPath) -> int | None:
    try:
        return file_size(path)
    except OSError:
        return None
