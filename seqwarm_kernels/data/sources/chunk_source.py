"""Items from chunk files, in an order shuffled by chunk and by buffer."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...utils.checks import check_bool, check_int
from ..files.manifest import Chunk, Manifest, read_lengths
from ..files.reader import ChunkError, format_of, read_chunk
from .base import BlockSource
from .permutation import shuffled

ON_ERROR = ("raise", "skip")


class ChunkSource(BlockSource):
    """The items of chunk files: shuffled files, and in each buffer of `buffer_chunks` files shuffled items.

    Restoring reads the files of one buffer. Each rank reads files of its own; their number may differ by one.

    Args:
        paths: a folder of `write_chunks`, or files in their order: .txt or .jsonl, with .gz or .zst or without.
            A file is read as a whole. Blank lines are no items, nor is a byte-order mark part of one.
        seed: of the order, with the epoch.
        shuffle: files and items; without it the order is that of the files.
        buffer_chunks: files that lie in memory together and whose items are mixed. More of them mix further;
            restoring reads so many.
        infinite: one epoch after another for ever, each in an order of its own.
        rank, world_size: this process takes every world_size-th file of the epoch's order.
        with_lengths: items come as (item, length), with the lengths that `write_chunks` counted.
        on_error: "raise" where a file is missing, damaged, cut short, empty or not what its manifest says, or "skip"
            the file with a warning, which `skipped` keeps. A state counts the items that could be read: what was
            skipped in its open buffer must not be repaired before it is restored. Files of one's own that changed
            their size are refused; of a folder of `write_chunks` this is not noticed.

    Raises:
        TypeError: `paths` is no path and no paths.
        ValueError: there are fewer files than ranks, no files, a file of another kind, no lengths though wanted, or a
            folder that is not there or has no finished manifest.
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
        check_int("buffer_chunks", buffer_chunks, minimum=1)
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error must be one of {', '.join(ON_ERROR)}, got {on_error!r}")
        check_bool("with_lengths", with_lengths)
        self.buffer_chunks, self.with_lengths, self.on_error = buffer_chunks, with_lengths, on_error
        self.skipped: dict[str, str] = {}  #: file -> why, of those that were left out so far
        self._paths, self._chunks = _find(paths, with_lengths)
        if len(self._paths) < world_size:
            raise ValueError(
                f"paths must hold a file for each of {world_size} ranks, got {len(self._paths)}: write smaller chunks"
            )
        self._files = _fingerprint(self._paths, self._chunks)

    def _blocks(self) -> Iterator[list[Any]]:
        own = np.arange(self.rank, len(self._paths), self.world_size)
        if self.shuffle:
            own = shuffled(own, len(self._paths), self.seed, self.epoch)
        while numbers := own[self._block * self.buffer_chunks :][: self.buffer_chunks].tolist():
            items = [item for number in numbers for item in self._read(number)]
            if self.shuffle:
                order = shuffled(np.arange(len(items)), len(items), self.seed, self.epoch, self.rank, self._block + 1)
                items = [items[place] for place in order.tolist()]
            yield items

    def _read(self, number: int) -> list[Any]:
        path, chunk = self._paths[number], self._chunks[number]
        try:
            items = read_chunk(path) if chunk is None else read_chunk(path, chunk.items, chunk.bytes)
            return (
                list(zip(items, read_lengths(path, len(items)).tolist(), strict=True)) if self.with_lengths else items
            )
        except ChunkError as error:
            if self.on_error == "raise":
                raise
            if str(path) not in self.skipped:
                warnings.warn(f"skipped: {error}", stacklevel=2)
            self.skipped[str(path)] = str(error)
            return []

    def _configuration(self) -> dict[str, Any]:
        return {"buffer_chunks": self.buffer_chunks, "files": self._files}


def _find(paths: Any, with_lengths: bool) -> tuple[list[Path], list[Chunk | None]]:
    one = isinstance(paths, (str, os.PathLike))
    if one and not Path(paths).exists():
        raise ValueError(f"paths must be there, got {str(paths)!r}: no such file or folder")
    if one and Path(paths).is_dir():
        return _in_folder(Path(paths), with_lengths)
    files = _files_of([paths] if one else paths)
    if with_lengths:
        raise ValueError(f"with_lengths needs a folder of write_chunks as paths, got {paths!r:.80}")
    return files, [None] * len(files)


def _in_folder(folder: Path, with_lengths: bool) -> tuple[list[Path], list[Chunk | None]]:
    manifest = Manifest.read(folder)
    if manifest.chunks is None:
        raise ValueError(f"write_chunks has not finished {folder}: call it again with the same items")
    if with_lengths and manifest.lengths_of is None:
        raise ValueError(f"with_lengths needs lengths, {folder} has none: write_chunks counts them with a length_fn")
    return [folder / chunk.file for chunk in manifest.chunks], list(manifest.chunks)


def _files_of(paths: Any) -> list[Path]:
    """Those that are missing may be skipped later, when their turn has come."""
    wanted = "paths must be a folder of write_chunks, a file, or files"
    if isinstance(paths, bytes) or not isinstance(paths, Iterable):
        raise TypeError(f"{wanted}, got {type(paths).__name__}")
    files = []
    for path in paths:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"{wanted}, got {type(path).__name__} among them")
        if Path(path).is_dir():
            raise ValueError(f"{wanted}, got the folder {path} among files")
        format_of(Path(path))
        files.append(Path(path))
    if not files:
        raise ValueError("paths must name at least one file, got none")
    return files


def _fingerprint(paths: list[Path], chunks: list[Chunk | None]) -> str:
    """By names and sizes: a folder may be moved, and no file is read."""
    facts = [
        (path.name, *((None, _size(path)) if chunk is None else (chunk.items, chunk.bytes)))
        for path, chunk in zip(paths, chunks, strict=True)
    ]
    return f"{len(facts)} files, {hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
