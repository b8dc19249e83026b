"""The base class of sources of documents: files whose documents can be counted and measured without reading tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
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
        self._first_documents = [0, *accumulate(map(len, files))]  # of each file, and the number of all documents
        # Few documents are divided more finely, so that every rank has some.
        self._run = max(1, min(_RUN, self.buffer_size, self._first_documents[-1] // self.world_size))
        self._fingerprint = fingerprint([file.facts for file in files])

    def lengths(self) -> IntArray:
        """The number of tokens of each document of all ranks, in the order of the files, (documents,) int64.

        No tokens are read.
        """
        return np.concatenate([file.lengths() for file in self._files])

    def _blocks(self) -> Iterator[list[Any]]:
        num_runs = -(-self._first_documents[-1] // self._run)
        while len(runs := self._numbers(self.buffer_size // self._run, num_runs)):
            yield self._shuffled(self._read(runs))

    def _read(self, runs: IntArray) -> list[Any]:
        """The documents of runs, file after file. A run may begin in one file and end in another one."""
        firsts, parts = self._first_documents, defaultdict(list)
        for run in runs.tolist():
            begin, end = run * self._run, min((run + 1) * self._run, firsts[-1])
            for number in range(bisect_right(firsts, begin) - 1, bisect_left(firsts, end)):
                first, after = firsts[number : number + 2]
                if first < after:  # a file may have no documents
                    parts[number].append((max(begin, first) - first, min(end, after) - first))
        return [item for number, found in parts.items() for item in self._files[number].read(found)]

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "buffer_size": self.buffer_size, "files": self._fingerprint}
