"""The base class of sources that read their items in chunks: files or row groups."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np

from ...utils.checks import check_choice, check_int
from ..files.reader import ChunkError
from ..files.transfers import read_ahead
from .base import BlockSource
from .permutation import permutation


class ChunkedSource(BlockSource):
    """Chunks in random order, and the items of each buffer of `buffer_chunks` chunks in random order.

    The ranks read different chunks. Their numbers differ by at most one. A subclass says how many chunks there are, how
    one is read, and whether they are read ahead, in threads and one buffer at most.

    Attributes:
        skipped: the reason for each chunk that was skipped so far.
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
        if num_chunks < self.world_size:
            raise ValueError(
                f"paths must hold a file or row group for each of {self.world_size} ranks, got {num_chunks}"
            )
        self.with_lengths, self.on_error = with_lengths, on_error
        self.skipped: dict[str, str] = {}
        self._num_chunks, self._reads_ahead = num_chunks, reads_ahead

    @abstractmethod
    def _load(self, chunk: int) -> list[Any]:
        """Read the items of a chunk, or pairs of an item and its length. Several threads may call it.

        Raises:
            ChunkError: The chunk is missing, damaged or has unexpected contents.
        """

    @abstractmethod
    def _name_of(self, chunk: int) -> str:
        """The chunk's key in `skipped`."""

    def _blocks(self) -> Iterator[list[Any]]:
        order = self.order
        numbers = (
            permutation(self._num_chunks, order.seed, self.epoch) if order.shuffle else np.arange(self._num_chunks)
        )
        chunks = numbers[order.rank :: order.world_size][self._block * self.buffer_chunks :].tolist()
        if self._reads_ahead:
            outcomes = read_ahead(self._load_or_error, chunks, self.buffer_chunks)
        else:
            outcomes = map(self._load_or_error, chunks)
        loaded = map(self._loaded_or_skipped, chunks, outcomes)
        while buffer := list(islice(loaded, self.buffer_chunks)):
            yield self._shuffled(list(chain.from_iterable(buffer)))

    def _load_or_error(self, chunk: int) -> list[Any] | ChunkError:
        try:
            return self._load(chunk)
        except ChunkError as error:
            return error

    def _loaded_or_skipped(self, chunk: int, outcome: list[Any] | ChunkError) -> list[Any]:
        if not isinstance(outcome, ChunkError):
            return outcome
        if self.on_error == "raise":
            raise outcome
        name = self._name_of(chunk)
        if name not in self.skipped:
            warnings.warn(f"skipped: {outcome}", stacklevel=2)
        self.skipped[name] = str(outcome)
        return []

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "buffer_chunks": self.buffer_chunks}
