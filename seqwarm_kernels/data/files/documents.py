"""Files that hold documents one after another, whose positions are known without reading tokens."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch_planning.plan import IntArray
from .data_file import DataFile
from .token_arrays import TokenArray


class DocumentFile(ABC):
    """A file of documents. Its `facts` tell it from another one of the same name."""

    def __init__(self, file: DataFile, num_documents: int, facts: tuple[Any, ...]) -> None:
        self.file = file
        self.facts = (file.path.name, num_documents, *facts)
        self._num_documents = num_documents

    def __len__(self) -> int:
        """Number of documents."""
        return self._num_documents

    @abstractmethod
    def lengths(self) -> IntArray:
        """The number of tokens of each document, (documents,) int64."""

    @abstractmethod
    def read(self, runs: Sequence[tuple[int, int]]) -> list[Any]:
        """The documents of several runs. A run is its first document and the one after its last.

        A `ChunkError` names the file and the byte if the file is missing, shorter than it was, or damaged.
        """


class TokenFile(DocumentFile):
    """Tokens of one dtype, document after document.

    The boundaries of documents, (documents + 1,) int64, are in tokens from the first one and do not decrease.
    """

    def __init__(self, array: TokenArray, boundaries: IntArray) -> None:
        super().__init__(array.file, len(boundaries) - 1, (array.dtype.str, zlib.crc32(boundaries.data)))
        self._dtype, self._first_byte, self._boundaries = array.dtype, array.first_byte, boundaries

    def lengths(self) -> IntArray:
        return np.diff(self._boundaries)

    def read(self, runs: Sequence[tuple[int, int]]) -> list[NDArray[Any]]:
        boundaries = [self._boundaries[begin : end + 1] for begin, end in runs]
        parts = [
            (self._first_byte + int(each[0]) * self._dtype.itemsize, int(each[-1] - each[0])) for each in boundaries
        ]
        read = zip(self.file.read_parts(self._dtype, parts), boundaries, strict=True)
        return [document for tokens, each in read for document in split(tokens, each - each[0])]


def split(values: NDArray[Any], boundaries: IntArray) -> list[NDArray[Any]]:
    """Views of the parts of `values` between neighbouring boundaries."""
    return [values[begin:end] for begin, end in pairwise(boundaries.tolist())]
