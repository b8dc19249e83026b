"""A source over chunk files, shuffled by file and inside buffers of files."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...utils.checks import check_bool, check_int, check_iterable, check_path
from ..batch_planning.plan import IntArray
from ..files.manifest import Chunk, Manifest, read_lengths
from ..files.reader import ChunkError, format_of, read_chunk
from .base import BlockSource
from .permutation import ORDER, permutation

ON_ERROR = ("raise", "skip")

_NO_LENGTHS = np.empty(0, np.int64)


class _ReadFile(NamedTuple):
    items: list[Any]
    lengths: IntArray  #: (items,) int64 with `with_lengths`, else (0,)


class ChunkSource(BlockSource):
    """The items of chunk files. The files are shuffled, and the items inside each buffer of `buffer_chunks` files.

    Restoring reads the files of one buffer. The ranks read different files. The number of files per rank differs by at
    most one.

    Args:
        paths: a folder of `write_chunks`, or files in order: .txt or .jsonl, optionally followed by .gz or .zst. Each
            file is read as a whole. Blank lines and a byte-order mark are skipped.
        seed: determines the order, together with the epoch.
        shuffle: shuffle the files and the items. False: keep the order of the files.
        buffer_chunks: number of files that are in memory together and whose items are mixed. A larger buffer mixes
            further. Restoring reads this many files.
        infinite: repeat epochs forever, each in its own order.
        rank, world_size: this process reads every world_size-th file of the epoch's order.
        with_lengths: yield (item, length) with the lengths stored by `write_chunks`.
        on_error: what to do if a file is missing, damaged, truncated, empty or differs from its manifest. "raise"
            raises a `ChunkError`. "skip" skips the file with a warning and records the reason in `skipped`. A state
            counts the items that could be read. Do not repair a file that was skipped in the open buffer before the
            state is restored: the position would shift. For a list of files, a state is rejected if the size of a file
            has changed. For a folder of `write_chunks`, such a change is not detected.

    Raises:
        TypeError: `paths` is neither a path nor a list of paths, or a setting has the wrong type.
        ValueError: `paths` has fewer files than ranks, no files, a file with another suffix, a missing folder, a folder
            without a finished manifest, or no lengths for `with_lengths`; or a setting is out of range.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
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
        super().__init__(seed=seed, shuffle=shuffle, infinite=infinite, rank=rank, world_size=world_size)
        buffer_chunks = check_int("buffer_chunks", buffer_chunks, minimum=1)
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error must be one of {', '.join(ON_ERROR)}, got {on_error!r}")
        check_bool("with_lengths", with_lengths)
        self.buffer_chunks, self.with_lengths, self.on_error = buffer_chunks, with_lengths, on_error
        self.skipped: dict[str, str] = {}  #: file -> reason, for the files skipped so far
        self._paths, self._chunks = _find(paths, with_lengths)
        if len(self._paths) < world_size:
            raise ValueError(
                f"paths must hold a file for each of {world_size} ranks, got {len(self._paths)}: write smaller chunks"
            )
        self._fingerprint = _fingerprint(self._paths, self._chunks)

    def _blocks(self) -> Iterator[list[Any]]:
        num_files = len(self._paths)
        file_order = permutation(num_files, self.seed, self.epoch) if self.shuffle else np.arange(num_files)
        files_of_rank = file_order[self.rank :: self.world_size]
        while files := files_of_rank[self._block * self.buffer_chunks :][: self.buffer_chunks].tolist():
            read = [self._read(file) for file in files]
            items = read[0].items if len(read) == 1 else [item for each in read for item in each.items]
            lengths = np.concatenate([each.lengths for each in read])
            if self.shuffle:
                order = permutation(len(items), self.seed, self.epoch, self.rank, self._block + 1)
                items = [items[index] for index in order.tolist()]
                lengths = lengths[order] if self.with_lengths else lengths
            yield list(zip(items, lengths.tolist(), strict=True)) if self.with_lengths else items

    def _num_blocks(self) -> int:
        files = len(range(self.rank, len(self._paths), self.world_size))
        return -(-files // self.buffer_chunks)

    def _read(self, file: int) -> _ReadFile:
        path, chunk = self._paths[file], self._chunks[file]
        try:
            items = read_chunk(path) if chunk is None else read_chunk(path, chunk.items, chunk.bytes)
            return _ReadFile(items, read_lengths(path, len(items)) if self.with_lengths else _NO_LENGTHS)
        except ChunkError as error:
            if self.on_error == "raise":
                raise
            if str(path) not in self.skipped:
                warnings.warn(f"skipped: {error}", stacklevel=2)
            self.skipped[str(path)] = str(error)
            return _ReadFile([], _NO_LENGTHS)

    def _configuration(self) -> dict[str, Any]:
        return {"order": ORDER, "buffer_chunks": self.buffer_chunks, "files": self._fingerprint}


def _find(paths: Any, with_lengths: bool) -> tuple[list[Path], list[Chunk | None]]:
    is_single = isinstance(paths, (str, os.PathLike))
    if is_single and not Path(paths).exists():
        raise ValueError(f"paths must exist, got {str(paths)!r}: no such file or folder")
    if is_single and Path(paths).is_dir():
        return _in_folder(Path(paths), with_lengths)
    files = _checked_paths([paths] if is_single else paths)
    if with_lengths:
        raise ValueError(f"with_lengths needs a folder of write_chunks as paths, got {paths!r:.80}")
    return files, [None] * len(files)


def _in_folder(folder: Path, with_lengths: bool) -> tuple[list[Path], list[Chunk | None]]:
    manifest = Manifest.read(folder)
    if manifest.chunks is None:
        raise ValueError(f"write_chunks has not finished {folder}: call it again with the same items")
    if with_lengths and manifest.length_fn is None:
        raise ValueError(f"with_lengths needs lengths, {folder} has none: call write_chunks with length_fn")
    return [folder / chunk.file for chunk in manifest.chunks], list(manifest.chunks)


def _checked_paths(paths: Any) -> list[Path]:
    """Return the paths after checking them. A missing file is not an error here: it may be skipped when it is read."""
    wanted = "a folder of write_chunks, a file, or files"
    check_iterable("paths", paths, wanted)
    files = []
    for path in paths:
        file = check_path("each of paths", path)
        if file.is_dir():
            raise ValueError(f"paths must be {wanted}, got the folder {file} among files")
        format_of(file)
        files.append(file)
    if not files:
        raise ValueError("paths must name at least one file, got none")
    return files


def _fingerprint(paths: list[Path], chunks: list[Chunk | None]) -> str:
    """Hash the names and sizes of the files. The folder may be moved, and no file is read."""
    entries = [
        (path.name, *((None, _size(path)) if chunk is None else (chunk.items, chunk.bytes)))
        for path, chunk in zip(paths, chunks, strict=True)
    ]
    return f"{len(entries)} files, {hashlib.sha256(repr(entries).encode()).hexdigest()[:16]}"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
