"""The base class of sources that read their items in chunks: files, row groups or shards."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ...utils.checks import check_choice, check_int
from ..batch_planning.plan import IntArray
from ..files.reader import ChunkError
from ..files.transfers import read_ahead
from .base import BlockSource
from .permutation import permutation

NO_LENGTHS = np.empty(0, np.int64)


class LoadedChunk(NamedTuple):
    items: list[Any]
    lengths: IntArray  #: (items,) int64 with `with_lengths`, else (0,)


class ChunkedSource(BlockSource):
    """Chunks in random order, and the items of each buffer of `buffer_chunks` chunks in random order.

    The ranks read different chunks. Their numbers differ by at most one. A subclass says how many chunks there are, how
    one is read, and whether they are read ahead. Chunks are read ahead in threads, one buffer at most.
    """

    def __init__(
        self,
        *,
        num_chunks: int,
        reads_ahead: bool,
        buffer_chunks: int = 1,
        with_lengths: bool = False,
        on_error: str = "raise",
        **order: Any,
    ) -> None:
        super().__init__(**order)
        check_choice("on_error", on_error, ("raise", "skip"))
        self.buffer_chunks = check_int("buffer_chunks", buffer_chunks, minimum=1)
        self.with_lengths, self.on_error = with_lengths, on_error
        if num_chunks < self.world_size:
            raise ValueError(
                f"paths must hold a file or row group for each of {self.world_size} ranks, got {num_chunks}"
            )
        self.skipped: dict[str, str] = {}  #: chunk -> reason, for the chunks skipped so far
        self._num_chunks, self._reads_ahead = num_chunks, reads_ahead

    @abstractmethod
    def _load(self, chunk: int) -> LoadedChunk:
        """Read a chunk. Several threads may call it.

        Raises:
            ChunkError: The chunk is missing, damaged or has unexpected contents.
        """

    @abstractmethod
    def _name_of(self, chunk: int) -> str:
        """The chunk's key in `skipped`."""

    def _blocks(self) -> Iterator[list[Any]]:
        seed, shuffle, rank = self.order.seed, self.order.shuffle, self.order.rank
        order = permutation(self._num_chunks, seed, self.epoch) if shuffle else np.arange(self._num_chunks)
        chunks = order[rank :: self.world_size][self._block * self.buffer_chunks :].tolist()
        outcomes = (
            read_ahead(self._try_load, chunks, self.buffer_chunks) if self._reads_ahead else map(self._try_load, chunks)
        )
        loaded = map(self._loaded_or_skipped, chunks, outcomes)
        while read := list(islice(loaded, self.buffer_chunks)):
            items = read[0].items if len(read) == 1 else [item for each in read for item in each.items]
            lengths = np.concatenate([each.lengths for each in read])
            if shuffle:
                order = permutation(len(items), seed, self.epoch, rank, self._block + 1)
                items = [items[index] for index in order.tolist()]
                lengths = lengths[order] if self.with_lengths else lengths
            yield list(zip(items, lengths.tolist(), strict=True)) if self.with_lengths else items

    def _try_load(self, chunk: int) -> LoadedChunk | ChunkError:
        try:
            return self._load(chunk)
        except ChunkError as error:
            return error

    def _loaded_or_skipped(self, chunk: int, outcome: LoadedChunk | ChunkError) -> LoadedChunk:
        if isinstance(outcome, LoadedChunk):
            return outcome
        if self.on_error == "raise":
            raise outcome
        name = self._name_of(chunk)
        if name not in self.skipped:
            warnings.warn(f"skipped: {outcome}", stacklevel=2)
        self.skipped[name] = str(outcome)
        return LoadedChunk([], NO_LENGTHS)

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "buffer_chunks": self.buffer_chunks}
