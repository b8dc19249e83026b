"""Shards in MosaicML's MDS format: columns of tokens or text. mosaicml-streaming reads the index and decodes values.

Shards and samples are read here. mosaicml-streaming opens a shard for each sample and decodes all of its columns: 27
million tokens a second, against 57 million here. It unpacks a compressed shard whatever its size.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...utils.checks import needs
from ...utils.files import write_atomically
from ..batch_planning.plan import IntArray
from .columns import Columns, check_no_labels, names_of
from .data_file import DataFile
from .documents import DocumentFile, split
from .reader import ChunkError
from .remote import AnyPath, folder_of_copy

INDEX = "index.json"  #: name of the file that lists the shards of a folder
_BYTE, _UINT32 = np.dtype(np.uint8), np.dtype("<u4")
_TOKENS = re.compile(r"bytes|ndarray:(u?int(?:8|16|32|64))(?::\d+)?")  #: encodings of tokens
_CHECKED_FOR_DTYPE = 64  #: samples of a shard
#: mosaicml-streaming's names of compressions, and those of cramjam.
_ALGORITHMS = {"br": "brotli", "bz2": "bzip2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}


def open_mds(folder: AnyPath, column: Columns, dtype: np.dtype[Any] | None) -> list[MDSShard]:
    """The shards of a folder that `MDSWriter` wrote, or of a merged index. Nothing but the index is read.

    Args:
        folder: has an index.json, and the shards beside it or in folders.
        column: the columns of items.
        dtype: of the tokens in columns of bytes.

    Raises:
        ImportError: mosaicml-streaming is not installed.
        ChunkError: The index is missing or damaged.
        ValueError: There is no such column, its encoding is another one, or it needs or has another dtype.
    """
    with needs("MDS shards need mosaicml-streaming", "seqwarm_kernels[mds]"):
        from streaming.base.format import reader_from_json
    file = DataFile(folder / INDEX)
    content = file.read(_BYTE, 0, file.size).tobytes()
    try:
        shards = [reader_from_json(str(folder), None, entry) for entry in json.loads(content)["shards"]]
        for shard in shards:
            _check_entries(shard)
    except Exception as error:  # the package raises errors of many types
        raise file.error(f"is not an index of MDS shards: {type(error).__name__}: {error}") from error
    if not shards:
        raise file.error("the index has no shards")
    return [MDSShard(folder, shard, column, dtype) for shard in shards]


def _check_entries(shard: Any) -> None:
    """Raise an error, of any type, if entries are wrong that mosaicml-streaming takes as they are."""
    if shard.compression and shard.compression.partition(":")[0] not in _ALGORITHMS:
        raise ValueError(f"a shard has the compression {shard.compression!r}")
    for file in (shard.raw_data, shard.zip_data if shard.compression else shard.raw_data):
        path = PurePosixPath(file.basename)
        if path.is_absolute() or ".." in path.parts or not path.name:  # an unpacked shard is written there
            raise ValueError(f"a shard has a file named {file.basename!r}")
    for name, encoding, size in zip(shard.column_names, shard.column_encodings, shard.column_sizes, strict=True):
        if not (isinstance(name, str) and isinstance(encoding, str) and _is_count(size or 0)):
            raise ValueError(f"a shard has a column named {name!r} of encoding {encoding!r} and size {size!r}")
    if not (_is_count(shard.samples) and _is_count(shard.raw_data.bytes)):
        raise ValueError(f"a shard has {shard.samples!r} samples in {shard.raw_data.bytes!r} bytes")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32  # offsets in a shard are uint32


class _Column(NamedTuple):
    name: str
    number: int  #: in a sample
    encoding: str
    dtype: np.dtype[Any] | None  #: of tokens, None for text


class MDSShard(DocumentFile):
    """One shard: the number of samples, the byte where each sample begins and the last one ends, then the samples.

    A sample is the sizes of those columns that vary in size, then the columns.

    Args:
        folder: the folder of the index.
        shard: mosaicml-streaming's reader of the shard.
        column, dtype: as in `open_mds`.
    """

    def __init__(self, folder: AnyPath, shard: Any, column: Columns, dtype: np.dtype[Any] | None) -> None:
        path = folder / shard.raw_data.basename
        file = _CompressedShard(folder, shard) if shard.compression else DataFile(path)
        super().__init__(file, shard.samples, (shard.raw_data.bytes, column))
        self._bytes: int = shard.raw_data.bytes
        self._sizes: list[int | None] = shard.column_sizes
        self._num_sizes = sum(not size for size in self._sizes)  # that stand in front of a sample
        encodings = dict(zip(shard.column_names, shard.column_encodings, strict=True))
        self._columns = []
        for name in names_of(column):
            if name not in encodings:
                raise ValueError(f"column must be one of {', '.join(encodings)} of {path}, got {name!r}")
            own_dtype = _dtype_of(f"column {name!r} of {path}", encodings[name], dtype)
            self._columns.append(_Column(name, shard.column_names.index(name), encodings[name], own_dtype))
        self._gives_dicts = not isinstance(column, str)
        if isinstance(column, str) and self._columns[0].dtype is not None:
            check_no_labels(column, [name for name, encoding in encodings.items() if _TOKENS.fullmatch(encoding)])
        self._is_dtype_checked = False

    def lengths(self) -> IntArray:
        """Tokens of each sample in the first column, or bytes of text. If others vary in size, the samples are read."""
        self._check_dtype()
        (offsets,) = self._offsets([(0, len(self))])
        column, size = self._columns[0], self._sizes[self._columns[0].number]
        itemsize = 1 if column.dtype is None else column.dtype.itemsize
        if size:
            return np.full(len(self), size // itemsize, np.int64)
        if self._num_sizes > 1:
            values = [row[0] for row in self._rows([(0, len(self))])]
            return np.array([len(value.encode() if column.dtype is None else value) for value in values], np.int64)
        sizes = np.diff(offsets) - 4 - sum(size or 0 for size in self._sizes)
        if column.encoding.startswith("ndarray"):
            sizes -= _bytes_of_shape(sizes, itemsize)
        lengths, rests = np.divmod(sizes, itemsize)
        is_damaged = (rests != 0) | (lengths < 0)
        if is_damaged.any():
            number = int(np.argmax(is_damaged))
            raise self._damaged(int(offsets[number]), number, f"it does not hold whole tokens of {column.dtype}")
        return lengths

    def read(self, runs: Sequence[tuple[int, int]]) -> list[Any]:
        self._check_dtype()
        rows, names = self._rows(runs), [column.name for column in self._columns]
        return [dict(zip(names, row, strict=True)) if self._gives_dicts else row[0] for row in rows]

    def _rows(self, runs: Sequence[tuple[int, int]]) -> list[list[Any]]:
        """The values of the columns in each sample."""
        offsets = self._offsets(runs)
        parts = self.file.read_parts(_BYTE, [(int(each[0]), int(each[-1] - each[0])) for each in offsets])
        rows = []
        for (begin, _), each, part in zip(runs, offsets, parts, strict=True):
            for number, sample in enumerate(split(part, each - each[0])):
                try:
                    rows.append(self._decoded(sample))
                except Exception as error:  # the package raises errors of many types
                    raise self._damaged(int(each[number]), begin + number, str(error)) from error
        return rows

    def _decoded(self, sample: NDArray[np.uint8]) -> list[Any]:
        from streaming.base.format.mds.encodings import mds_decode

        given = iter(sample[: 4 * self._num_sizes].view(_UINT32).tolist())
        bounds = list(accumulate((size or next(given) for size in self._sizes), initial=4 * self._num_sizes))
        if bounds[-1] != len(sample):
            raise ValueError(f"its columns and their sizes need {bounds[-1]:,} bytes, the sample has {len(sample):,}")
        row = []
        for column in self._columns:
            value = mds_decode(column.encoding, sample[bounds[column.number] : bounds[column.number + 1]].tobytes())
            row.append(np.frombuffer(value, column.dtype) if column.encoding == "bytes" else value)
        return row

    def _check_dtype(self) -> None:
        """Columns of bytes must not hold tokens of a wider dtype than the given one, by some of their samples."""
        if self._is_dtype_checked or all(column.encoding != "bytes" for column in self._columns):
            return
        step = max(1, len(self) // _CHECKED_FOR_DTYPE)  # of the whole shard, which may be sorted by length
        rows = self._rows([(number, number + 1) for number in range(0, len(self), step)])
        for place, column in enumerate(self._columns):
            if rows and column.encoding == "bytes":
                fitting = _fitting_dtype([row[place] for row in rows])
                if fitting != column.dtype:
                    where = f"column {column.name!r} of {self.file.path}"
                    raise ValueError(f"dtype must be {fitting} for {where}, got {column.dtype}")
        self._is_dtype_checked = True

    def _offsets(self, runs: Sequence[tuple[int, int]]) -> list[IntArray]:
        """For each run, the bytes where its samples begin, and where the last one ends, (samples + 1,) int64."""
        self.file.check_size(self._bytes, f"{INDEX} says {self._bytes:,} bytes")
        count = int(self.file.read(_UINT32, 0, 1)[0])
        if count != len(self):
            raise self.file.error_at(0, f"the file has {count:,} samples, {INDEX} says {len(self):,}")
        parts = self.file.read_parts(_UINT32, [(4 * (1 + begin), end - begin + 1) for begin, end in runs])
        found = [part.astype(np.int64) for part in parts]
        for (begin, _), offsets in zip(runs, found, strict=True):
            is_valid = (np.diff(offsets, prepend=4 * (2 + len(self))) >= 0) & (offsets <= self._bytes)
            if not is_valid.all():
                number = int(np.argmin(is_valid))
                problem = f"sample {begin + number} cannot begin at byte {offsets[number]:,}"
                raise self.file.error_at(4 * (1 + begin + number), problem)
        return found

    def _damaged(self, byte: int, number: int, problem: str) -> ChunkError:
        return self.file.error_at(byte, f"sample {number} is damaged: {problem}")


class _CompressedShard(DataFile):
    """A compressed shard. It is unpacked beside its file when it is first read, as mosaicml-streaming does.

    If that folder cannot be written, or is at a URL, the shard is kept among the copies of files at URLs.
    """

    def __init__(self, folder: AnyPath, shard: Any) -> None:
        super().__init__(folder / shard.raw_data.basename)
        self._bytes: int = shard.raw_data.bytes
        self._compressed = DataFile(folder / shard.zip_data.basename)
        self._algorithm = _ALGORITHMS[shard.compression.partition(":")[0]]

    @cached_property
    def local(self) -> Path:
        if isinstance(self.path, Path) and self.path.exists():
            return self.path
        compressed, path = self._compressed.local, self.path
        try:
            if not isinstance(path, Path) or not os.access(path.parent, os.W_OK):
                path = folder_of_copy(compressed.resolve(), compressed.stat().st_mtime_ns) / path.name
            if not path.exists():
                write_atomically(path, self._unpacked())
        except OSError as error:
            raise self._compressed.error(f"cannot be unpacked: {error}") from error
        return path

    def _unpacked(self) -> bytes:
        """The shard. cramjam, unlike mosaicml-streaming, writes no more bytes than the index says."""
        with needs("compressed MDS shards need cramjam", "seqwarm_kernels[mds]"):
            module = getattr(import_module("cramjam"), self._algorithm)
        unpack = getattr(module, "decompress_raw_into", module.decompress_into)  # snappy's is without frames
        content, buffer = self._compressed.read(_BYTE, 0, self._compressed.size), np.empty(self._bytes, _BYTE)
        try:
            count = unpack(content, buffer)
        except Exception as error:  # the package has its own
            problem = f"the compressed file is damaged, or has more than the {self._bytes:,} bytes of {INDEX}: {error}"
            raise self._compressed.error(problem) from error
        if count != self._bytes:
            raise self._compressed.error(f"unpacks to {count:,} bytes, {INDEX} says {self._bytes:,}")
        return buffer.tobytes()


def _dtype_of(column: str, encoding: str, dtype: np.dtype[Any] | None) -> np.dtype[Any] | None:
    """The dtype of the tokens in a column, None for text. `column` is its name and file, for errors."""
    if encoding == "str":
        return None
    found = _TOKENS.fullmatch(encoding)
    if found is None:
        raise ValueError(f"{column} must hold bytes, an ndarray of ints or str, got {encoding}")
    own = dtype if encoding == "bytes" else np.dtype(found[1])
    if own is None:
        raise ValueError(f"dtype must be that of the tokens in {column}, which holds bytes, got None")
    if dtype not in (None, own):
        raise ValueError(f"dtype must be {own} for {column}, got {dtype}")
    return own


def _fitting_dtype(documents: list[NDArray[Any]]) -> np.dtype[Any]:
    """The dtype of tokens that may have been read as those of a narrower one: every second value is then near 0."""
    tokens = np.concatenate(documents)
    counts, dtype = np.array(list(map(len, documents))), tokens.dtype
    while dtype.itemsize < 8 and len(tokens) and not (counts % 2).any():
        lower, upper = tokens.astype(f"i{dtype.itemsize}").astype(np.int64).reshape(-1, 2).T
        upper = upper + (upper < 0)  # the upper half of a small negative number, such as an ignored label, is -1
        filled = (lower != 0) | (upper != 0)  # other pairs are padding, or the upper halves of int64
        if 2 * np.count_nonzero(np.abs(lower) > 256 * np.abs(upper).max()) <= np.count_nonzero(filled):
            break
        dtype = np.dtype(f"i{2 * dtype.itemsize}")
        tokens, counts = tokens.view(dtype), counts // 2
    return dtype


def _bytes_of_shape(sizes: IntArray, itemsize: int) -> IntArray:
    """Bytes in front of the tokens of an ndarray: one, and 1, 2, 4 or 8, the fewest that hold the length."""
    widths = np.full(len(sizes), 8, np.int64)
    for width in (4, 2, 1):
        widths[sizes - 1 - width < itemsize * 2 ** (8 * width)] = width
    return 1 + widths
