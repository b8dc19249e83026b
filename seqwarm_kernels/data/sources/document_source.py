"""The base class of sources of documents: files whose documents can be counted and measured without reading tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...utils.checks import check_int, check_iterable
from ..batch_planning.plan import IntArray
from ..files.documents import DocumentFile
from ..files.remote import AnyPath, check_location, check_named_once, is_path
from .base import BlockSource, fingerprint
from .permutation import ORDER, permutation, permuted

#: Documents that stand next to each other in a file and are read at once. On disks this is faster than one by one.
_RUN = 64


class DocumentSource(BlockSource):
    """The documents of files, in runs of neighbours. The runs are shuffled, and the documents inside each buffer.

    Restoring reads one buffer. The ranks read different runs.

    A subclass opens its files after the settings are checked, and passes them to `_set_files`.
    """

    def __init__(self, *, buffer_size: int, **order: Any) -> None:
        super().__init__(**order)
        self.buffer_size = check_int("buffer_size", buffer_size, minimum=1)

    def _set_files(self, files: Sequence[DocumentFile]) -> None:
        """The files of all ranks, in order."""
        self._files = files
        self._first_documents = np.cumsum([0, *map(len, files)])
        self._num_documents = int(self._first_documents[-1])
        # Few documents are divided more finely, so that every rank has some.
        self._run = max(1, min(_RUN, self.buffer_size, self._num_documents // self.world_size))
        self._num_runs = -(-self._num_documents // self._run)
        self._runs_per_block = self.buffer_size // self._run
        self._fingerprint = fingerprint([file.facts for file in files])

    def lengths(self) -> IntArray:
        """The number of tokens of each document of all ranks, in the order of the files, (documents,) int64.

        No tokens are read.
        """
        return np.concatenate([file.lengths() for file in self._files])

    def _blocks(self) -> Iterator[list[Any]]:
        while len(runs := self._runs_of_block(self._block)):
            items = self._read(runs)
            if self.shuffle:
                order = permutation(len(items), self.seed, self.epoch, self.rank, self._block + 1)
                items = [items[index] for index in order.tolist()]
            yield items

    def _runs_of_block(self, block: int) -> IntArray:
        """The numbers of the runs of a block of this rank, none after the last block."""
        first = self.rank + block * self._runs_per_block * self.world_size
        end = min(first + self._runs_per_block * self.world_size, self._num_runs)
        positions = np.arange(first, end, self.world_size)
        return permuted(positions, self._num_runs, self.seed, self.epoch) if self.shuffle else positions

    def _num_blocks(self) -> int:
        runs = len(range(self.rank, self._num_runs, self.world_size))
        return -(-runs // self._runs_per_block)

    def _read(self, runs: IntArray) -> list[Any]:
        """The documents of runs, which may stand in several files, file after file."""
        runs_of_files: dict[int, list[tuple[int, int]]] = {}
        for run in runs.tolist():
            begin, end = run * self._run, min((run + 1) * self._run, self._num_documents)
            number = int(np.searchsorted(self._first_documents, begin, side="right")) - 1
            while begin < end:
                first, after = self._first_documents[number : number + 2].tolist()
                if begin < after:  # a file may have no documents
                    runs_of_files.setdefault(number, []).append((begin - first, min(end, after) - first))
                begin, number = max(begin, min(end, after)), number + 1
        return [item for number, found in runs_of_files.items() for item in self._files[number].read(found)]

    def _configuration(self) -> dict[str, Any]:
        return {"order": ORDER, "buffer_size": self.buffer_size, "files": self._fingerprint}


def check_locations(name: str, values: object, wanted: str) -> list[AnyPath]:
    """Return one path or several as a list of at least one, without duplicates."""
    if is_path(values):
        return [check_location(name, values)]
    check_iterable(name, values, wanted)
    paths = [check_location(f"each of {name}", value) for value in values]  # type: ignore[attr-defined]  # checked
    if not paths:
        raise ValueError(f"{name} must name at least one, got none")
    check_named_once(name, paths, "file or folder")
    return paths
