"""The base class of sources of documents: files whose documents can be counted and measured without reading tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...utils.checks import check_int
from ..batch_planning.plan import IntArray
from ..files.documents import DocumentFile
from .base import BlockSource, fingerprint

#: Documents that stand next to each other in a file and are read at once. On disks this is faster than one by one.
_RUN = 64


class DocumentSource(BlockSource):
    """The documents of files, in runs of neighbours. The runs are shuffled, and the documents inside each buffer.

    Restoring reads one buffer. The ranks read different runs. A subclass passes its files to `_set_files`.
    """

    def __init__(self, *, buffer_size: int, **order: Any) -> None:
        super().__init__(**order)
        self.buffer_size = check_int("buffer_size", buffer_size, minimum=1)

    def _set_files(self, files: Sequence[DocumentFile]) -> None:
        """The files of all ranks, in order."""
        self._files = files
        # Few documents are divided more finely, so that every rank has some. A run is in one file.
        documents = sum(map(len, files))
        self._run = max(1, min(_RUN, self.buffer_size, documents // max(self.world_size, len(files))))
        self._first_runs = np.cumsum([0, *(-(-len(file) // self._run) for file in files)])  # of each file
        self._fingerprint = fingerprint([file.facts for file in files])

    def lengths(self) -> IntArray:
        """The number of tokens of each document of all ranks, in the order of the files, (documents,) int64.

        No tokens are read.
        """
        return np.concatenate([file.lengths() for file in self._files])

    def _blocks(self) -> Iterator[list[Any]]:
        while len(runs := self._numbers(self.buffer_size // self._run, int(self._first_runs[-1]))):
            yield self._shuffled(self._read(runs))

    def _read(self, runs: IntArray) -> list[Any]:
        """The documents of runs, file after file."""
        numbers = np.searchsorted(self._first_runs, runs, side="right") - 1
        items = []
        for number in np.unique(numbers).tolist():
            file = self._files[number]
            begins = (runs[numbers == number] - self._first_runs[number]) * self._run
            items += file.read([(begin, min(begin + self._run, len(file))) for begin in begins.tolist()])
        return items

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "buffer_size": self.buffer_size, "files": self._fingerprint}
