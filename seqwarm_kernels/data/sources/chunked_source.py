"""The base class of sources that read their items in chunks: files or row groups."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from ...utils.checks import check_choice, check_int
from ..batch_planning.plan import IntArray
from ..files.reader import ChunkError
from ..files.remote import AnyPath
from ..files.transfers import read_ahead
from .base import BlockSource

_THREADS = 16


class ChunkedSource(BlockSource):
    """Chunks in random order, and the items of each buffer of `buffer_chunks` chunks in random order.

    The ranks read different chunks. Their numbers differ by at most one. Chunks at URLs are read ahead, in threads and
    one buffer at most. A subclass passes its chunks to `_set_chunks`.

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

    def _set_chunks(self, chunks: Sequence[Any], paths: Iterable[AnyPath]) -> None:
        """The chunks of all ranks, in order, and the files that hold them."""
        if len(chunks) < self.world_size:
            raise ValueError(
                f"paths must hold a file or row group for each of {self.world_size} ranks, got {len(chunks)}"
            )
        self._chunks = chunks
        self._reads_ahead = not all(isinstance(path, Path) for path in paths)
        if self.with_lengths:
            self._check_has_lengths()

    @abstractmethod
    def _items(self, chunk: Any) -> list[Any]:
        """Read the items of a chunk. Several threads may call it.

        Raises:
            ChunkError: The chunk is missing, damaged or has unexpected contents.
        """

    @abstractmethod
    def _lengths(self, chunk: Any) -> IntArray:
        """Read the lengths of the items of a chunk. Otherwise as `_items`."""

    @abstractmethod
    def _check_has_lengths(self) -> None:
        """Raise a ValueError if nothing tells the lengths."""

    @abstractmethod
    def _name_of(self, chunk: Any) -> str:
        """The chunk's key in `skipped`."""

    def lengths(self) -> IntArray:
        """The number of tokens of each item of all ranks, in the order of the files, (items,) int64.

        The items are not read, unless they are lists of tokens without lengths.

        Raises:
            ValueError: There are no lengths, or those of a file are missing or cannot be read.
        """
        self._check_has_lengths()
        return np.concatenate([*read_ahead(self._lengths, self._chunks, _THREADS)])

    def _blocks(self) -> Iterator[list[Any]]:
        total = len(self._chunks)
        chunks = [self._chunks[number] for number in self._numbers(self.buffer_chunks, total, blocks=total).tolist()]
        read = read_ahead(self._load, chunks, self.buffer_chunks) if self._reads_ahead else map(self._load, chunks)
        loaded = map(self._loaded_or_skipped, chunks, read)
        while buffer := list(islice(loaded, self.buffer_chunks)):
            yield self._shuffled(list(chain.from_iterable(buffer)))

    def _load(self, chunk: Any) -> list[Any] | ChunkError:
        try:
            items = self._items(chunk)
            return list(zip(items, self._lengths(chunk).tolist(), strict=True)) if self.with_lengths else items
        except ChunkError as error:
            return error

    def _loaded_or_skipped(self, chunk: Any, loaded: list[Any] | ChunkError) -> list[Any]:
        if isinstance(loaded, ChunkError):
            self._skip(self._name_of(chunk), loaded)
            return []
        return loaded

    def _skip(self, name: str, error: ChunkError) -> None:
        """Raise the error, or warn of it once and go on."""
        if self.on_error == "raise":
            raise error
        if name not in self.skipped:
            warnings.warn(f"skipped: {error}", stacklevel=3)
        self.skipped[name] = str(error)

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "buffer_chunks": self.buffer_chunks}
