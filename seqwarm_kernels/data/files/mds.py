"""Shards in MosaicML's MDS format: a column of tokens or text, read with the package mosaicml-streaming."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.checks import needs
from ...utils.files import write_atomically
from ..batch_planning.plan import IntArray
from .data_file import DataFile
from .documents import DocumentFile, split
from .reader import ChunkError
from .remote import AnyPath, folder_of_copy

INDEX = "index.json"  #: name of the file that lists the shards of a folder
_BYTE, _UINT32 = np.dtype(np.uint8), np.dtype("<u4")
_ENCODINGS = "bytes, ndarray:DTYPE or ndarray:DTYPE:LENGTH with a dtype of ints, or str"
_ENCODING = re.compile(r"ndarray:(u?int(?:8|16|32|64))(?::\d+)?")
_LARGEST = 2**32  #: bytes of a shard, whose offsets are uint32


def open_mds(folder: AnyPath, column: str, dtype: np.dtype[Any] | None) -> list[DocumentFile]:
    """The shards of a folder that `MDSWriter` wrote. Nothing but the folder's index is read.

    Args:
        folder: has an index.json, and the shards beside it.
        column: the name of a column.
        dtype: of the tokens in a column of bytes.

    Raises:
        ImportError: mosaicml-streaming is not installed.
        ChunkError: The index is missing or damaged.
        ValueError: There is no such column, its encoding is another one, or it needs or has another dtype.
    """
    with needs("MDS shards need mosaicml-streaming", "seqwarm_kernels[mds]"):
        from streaming.base.format import reader_from_json
    index = DataFile(folder / INDEX)
    content = index.read(_BYTE, 0, index.size).tobytes()
    try:
        shards = [reader_from_json(str(folder), None, entry) for entry in json.loads(content)["shards"]]
        for number, shard in enumerate(shards):
            _check_entries(number, shard)
    except Exception as error:  # the package raises errors of many types
        raise index.error(f"is not an index of MDS shards: {type(error).__name__}: {error}") from error
    if not shards:
        raise index.error("the index has no shards")
    return [MDSShard(folder, shard, column, dtype) for shard in shards]


def _check_entries(number: int, shard: Any) -> None:
    """Check what mosaicml-streaming takes from the index without looking at it."""
    files = [shard.raw_data, *([] if shard.compression is None else [shard.zip_data])]
    names = [file.basename for file in files]
    if not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise ValueError(f"shard {number} has files named {names}")
    numbers = {"samples": shard.samples, "bytes": shard.raw_data.bytes}
    for name, value in numbers.items():
        if type(value) is not int or not 0 <= value < _LARGEST:
            raise ValueError(f"{name} of shard {number} is {value!r}")
    columns = list(zip(shard.column_names, shard.column_encodings, shard.column_sizes, strict=True))
    for name, encoding, size in columns:
        is_size = size is None or (type(size) is int and 0 < size < _LARGEST)
        if not (isinstance(name, str) and isinstance(encoding, str) and is_size):
            raise ValueError(f"shard {number} has a column named {name!r} of encoding {encoding!r} and size {size!r}")


class MDSShard(DocumentFile):
    """One shard: the number of samples, the byte where each sample begins and the last one ends, then the samples.

    A sample is the sizes of those columns that vary in size, then the columns.

    Args:
        folder: the folder of the shard.
        shard: mosaicml-streaming's reader of the shard.
        column, dtype: as in `open_mds`.
    """

    def __init__(self, folder: AnyPath, shard: Any, column: str, dtype: np.dtype[Any] | None) -> None:
        file = _ShardFile(folder, shard)
        super().__init__(file, shard.samples, (shard.raw_data.bytes, column))
        if column not in shard.column_names:
            raise ValueError(f"column must be one of {', '.join(shard.column_names)} of {file.path}, got {column!r}")
        self._column = shard.column_names.index(column)
        self._encoding: str = shard.column_encodings[self._column]
        self._dtype = _dtype_of(f"{column!r} of {file.path}", self._encoding, dtype)
        self._sizes: list[int | None] = shard.column_sizes
        self._num_sizes = sum(not size for size in self._sizes)  # that stand in front of a sample
        self._bytes: int = shard.raw_data.bytes

    def lengths(self) -> IntArray:
        """Tokens of each sample, or bytes of text. If other columns vary in size, the samples are read."""
        (offsets,) = self._offsets([(0, len(self))])
        sizes = self._column_sizes(offsets)
        if self._dtype is None:
            return sizes
        if self._encoding.startswith("ndarray") and not self._sizes[self._column]:
            sizes = sizes - _bytes_of_shape(sizes, self._dtype.itemsize)
        lengths, rests = np.divmod(sizes, self._dtype.itemsize)
        is_damaged = (rests != 0) | (lengths < 0)
        if is_damaged.any():
            number = int(np.argmax(is_damaged))
            raise self._damaged(int(offsets[number]), number, f"it does not hold whole tokens of {self._dtype}")
        return lengths

    def _column_sizes(self, offsets: IntArray) -> IntArray:
        """The bytes of the column in each sample, (samples,) int64."""
        size = self._sizes[self._column]
        if size:
            return np.full(len(self), size, np.int64)
        if self._num_sizes == 1:
            return np.diff(offsets) - 4 - sum(size or 0 for size in self._sizes)
        (data,) = self._read_samples([offsets])
        number = sum(not size for size in self._sizes[: self._column])
        bytes_of_size = (offsets[:-1] - offsets[0] + 4 * number)[:, None] + np.arange(4)
        return data[bytes_of_size].view(_UINT32)[:, 0].astype(np.int64)

    def read(self, runs: Sequence[tuple[int, int]]) -> list[Any]:
        offsets = self._offsets(runs)
        read = zip(runs, offsets, self._read_samples(offsets), strict=True)
        return [item for (begin, _), each, data in read for item in self._items(begin, each, data)]

    def _items(self, begin: int, offsets: IntArray, data: NDArray[np.uint8]) -> Iterator[Any]:
        """The items of neighbouring samples, of which `begin` is the first."""
        for number, sample in enumerate(split(data, offsets - offsets[0])):
            try:
                yield self._decoded(sample)
            except Exception as error:  # the package raises errors of many types
                raise self._damaged(int(offsets[number]), begin + number, str(error)) from error

    def _decoded(self, sample: NDArray[np.uint8]) -> Any:
        from streaming.base.format.mds.encodings import mds_decode

        given = iter(sample[: 4 * self._num_sizes].view(_UINT32).tolist())
        sizes = [size or next(given) for size in self._sizes]
        needed = 4 * self._num_sizes + sum(sizes)
        if needed != len(sample):
            raise ValueError(f"its columns and their sizes need {needed:,} bytes, the sample has {len(sample):,}")
        first = 4 * self._num_sizes + sum(sizes[: self._column])
        item = mds_decode(self._encoding, sample[first : first + sizes[self._column]].tobytes())
        return np.frombuffer(item, self._dtype) if isinstance(item, bytes) else item

    def _offsets(self, runs: Sequence[tuple[int, int]]) -> list[IntArray]:
        """For each run, the bytes where its samples begin, and where the last one ends, (samples + 1,) int64."""
        self.file.check_size(self._bytes, f"{INDEX} says {self._bytes:,} bytes")
        count = int(self.file.read(_UINT32, 0, 1)[0])
        if count != len(self):
            raise self.file.error_at(0, f"the file has {count:,} samples, {INDEX} says {len(self):,}")
        read = self.file.read_parts(_UINT32, [(4 * (1 + begin), end - begin + 1) for begin, end in runs])
        return [
            self._checked_offsets(begin, offsets.astype(np.int64))
            for (begin, _), offsets in zip(runs, read, strict=True)
        ]

    def _checked_offsets(self, begin: int, offsets: IntArray) -> IntArray:
        is_valid = (np.diff(offsets, prepend=4 * (2 + len(self))) >= 0) & (offsets <= self._bytes)
        if not is_valid.all():
            number = int(np.argmin(is_valid))
            problem = f"sample {begin + number} cannot begin at byte {offsets[number]:,}"
            raise self.file.error_at(4 * (1 + begin + number), problem)
        return offsets

    def _read_samples(self, offsets: Sequence[IntArray]) -> list[NDArray[np.uint8]]:
        return self.file.read_parts(_BYTE, [(int(each[0]), int(each[-1] - each[0])) for each in offsets])

    def _damaged(self, byte: int, number: int, problem: str) -> ChunkError:
        return self.file.error_at(byte, f"sample {number} is damaged: {problem}")


class _ShardFile(DataFile):
    """A shard, which may be compressed."""

    def __init__(self, folder: AnyPath, shard: Any) -> None:
        super().__init__(folder / shard.raw_data.basename)
        self._compression: str | None = shard.compression
        self._compressed = None if shard.zip_data is None else DataFile(folder / shard.zip_data.basename)

    @cached_property
    def local(self) -> Path:
        """The shard. A compressed one is written beside its local file, as mosaicml-streaming does.

        If that folder cannot be written, the shard is kept among the copies of files at URLs.
        """
        if self._compressed is None:
            return super().local
        if isinstance(self.path, Path) and self.path.exists():
            return self.path
        compressed = self._compressed.local
        path = compressed.with_name(self.path.name)
        try:
            if not os.access(path.parent, os.W_OK):
                path = folder_of_copy(compressed.resolve(), compressed.stat().st_mtime_ns) / path.name
            if not path.exists():
                write_atomically(path, self._decompressed(self._compressed))
        except OSError as error:
            raise self._compressed.error(f"cannot be decompressed: {error}") from error
        return path

    def _decompressed(self, file: DataFile) -> bytes:
        from streaming.base.compression import decompress

        content = file.read(_BYTE, 0, file.size).tobytes()
        try:
            return decompress(self._compression, content)
        except Exception as error:  # each algorithm has errors of its own
            raise file.error(f"the compressed file is damaged: {error}") from error


def _dtype_of(column: str, encoding: str, dtype: np.dtype[Any] | None) -> np.dtype[Any] | None:
    """The dtype of the tokens in a column, None for text. `column` is its name and place, for errors."""
    if encoding == "bytes":
        if dtype is None:
            raise ValueError(f"dtype must be that of the tokens in column {column}, which holds bytes, got None")
        return dtype
    found = _ENCODING.fullmatch(encoding)
    if encoding != "str" and not found:
        raise ValueError(f"column must have the encoding {_ENCODINGS}, got {encoding!r} for {column}")
    own = np.dtype(found[1]) if found else None
    if dtype is not None and dtype != own:
        raise ValueError(f"dtype must be None or that of column {column}, whose encoding is {encoding}, got {dtype}")
    return own


def _bytes_of_shape(sizes: IntArray, itemsize: int) -> IntArray:
    """Bytes in front of the tokens of an ndarray: one, and 1, 2, 4 or 8, the fewest that hold the length."""
    widths = np.full(len(sizes), 8, np.int64)
    for width in (4, 2, 1):
        widths[sizes - 1 - width < itemsize * 2 ** (8 * width)] = width
    return 1 + widths
