"""Shards in MosaicML's MDS format: columns of tokens or text. mosaicml-streaming reads the index and decodes values.

Shards and samples are read here. mosaicml-streaming opens a shard for each sample and decodes all of its columns: 27
million tokens a second, against 57 million here. It unpacks a compressed shard whatever its size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.checks import needs
from ...utils.files import write_atomically
from ..batch_planning.plan import IntArray
from .columns import Columns, check_no_labels, names_of
from .data_file import DataFile, fitting_dtype
from .documents import DocumentFile, split
from .reader import chunk_errors
from .remote import AnyPath, folder_of_copy

INDEX = "index.json"  #: name of the file that lists the shards of a folder
_BYTE, _UINT32 = np.dtype(np.uint8), np.dtype("<u4")
_NDARRAY = re.compile(r"ndarray:(u?int(?:8|16|32|64))(?::\d+)?")  #: encodings of ints in one dimension
_CHECKED = 64  #: samples of a shard that are checked before others are read
#: mosaicml-streaming's names of compressions, and those of cramjam.
_ALGORITHMS = {"br": "brotli", "bz2": "bzip2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}


def open_mds(folder: AnyPath, column: Columns, dtype: np.dtype[Any] | None) -> list[MDSShard]:
    """The shards of a folder that `MDSWriter` wrote, or of a merged index. Nothing but the index is read."""
    with needs("MDS shards need mosaicml-streaming", "seqwarm_kernels[mds]"):
        from streaming.base.format import reader_from_json
    file = DataFile(folder / INDEX)
    content = file.read(_BYTE, 0, file.size).tobytes()
    try:
        entries = json.loads(content)["shards"]
        shards = [MDSShard(folder, reader_from_json(str(folder), None, entry)) for entry in entries]
    except Exception as error:  # the package raises errors of many types
        raise file.error(f"is not an index of MDS shards: {type(error).__name__}: {error}") from error
    if not shards:
        raise file.error("the index has no shards")
    for shard in shards:
        shard.select(column, dtype)
    return shards


class MDSShard(DocumentFile):
    """One shard: the number of samples, the byte where each sample begins and the last one ends, then the samples.

    A sample is the sizes of those columns that vary in size, then the columns. mosaicml-streaming's reader of the shard
    takes most entries of the index as they are.
    """

    def __init__(self, folder: AnyPath, shard: Any) -> None:
        self._bytes: int = shard.raw_data.bytes
        counts = [shard.samples, self._bytes, *(size or 0 for size in shard.column_sizes)]
        if not all(type(count) is int and 0 <= count < 2**32 for count in counts):  # offsets are uint32
            raise ValueError(f"samples, bytes and sizes must be counts, got {counts}")
        file = _CompressedShard(folder, shard) if shard.compression else DataFile(folder / shard.raw_data.basename)
        super().__init__(file, shard.samples, (self._bytes,))
        names = [*map(str, shard.column_names)]
        self._encodings = dict(zip(names, map(str, shard.column_encodings), strict=True))
        self._sizes: dict[str, int | None] = dict(zip(names, shard.column_sizes, strict=True))
        self._varying = [name for name in names if not self._sizes[name]]  # their sizes stand in front of a sample

    def select(self, column: Columns, dtype: np.dtype[Any] | None) -> None:
        """Choose the columns of items. `dtype` is that of the tokens in columns of bytes."""
        self._column = column
        self._dtypes = {name: self._dtype_of(name, dtype) for name in names_of(column)}  # None for text
        if isinstance(column, str) and self._dtypes[column] is not None:
            holds_tokens = [
                name for name, each in self._encodings.items() if each == "bytes" or _NDARRAY.fullmatch(each)
            ]
            check_no_labels(column, holds_tokens)
        self.facts += (column,)
        self._is_checked = False

    def _dtype_of(self, name: str, dtype: np.dtype[Any] | None) -> np.dtype[Any] | None:
        encoding, where = self._encodings.get(name), f"column {name!r} of {self.file.path}"
        if encoding is None:
            raise ValueError(f"column must be one of {', '.join(self._encodings)} of {self.file.path}, got {name!r}")
        if encoding == "str":
            return None
        if encoding == "bytes":
            if dtype is None:
                raise ValueError(f"dtype must be that of the tokens in {where}, which holds bytes, got None")
            return dtype
        found = _NDARRAY.fullmatch(encoding)
        if found is None:
            raise ValueError(f"{where} must hold bytes, an ndarray of ints in one dimension or str, got {encoding}")
        return np.dtype(found[1])

    def lengths(self) -> IntArray:
        """Tokens of each sample in the first column, or bytes of text."""
        self._check_samples()
        name = names_of(self._column)[0]
        dtype, size = self._dtypes[name], self._sizes[name]
        itemsize = 1 if dtype is None else dtype.itemsize
        if size:
            return np.full(len(self), size // itemsize, np.int64)
        count = len(self._varying)
        if count == 1:
            sizes = np.diff(self._offsets) - 4 - sum(size or 0 for size in self._sizes.values())
        else:  # the sizes in front of the samples say it
            fronts = self.file.read_parts(_UINT32, [(begin, count) for begin in self._offsets[:-1].tolist()])
            sizes = np.array(fronts, np.int64).reshape(-1, count)[:, self._varying.index(name)]
        return (sizes - _bytes_of_shape(sizes, itemsize) if "ndarray" in self._encodings[name] else sizes) // itemsize

    def read(self, runs: Sequence[tuple[int, int]]) -> list[Any]:
        self._check_samples()
        samples = self._samples(runs)
        return [sample[self._column] for sample in samples] if isinstance(self._column, str) else samples

    def _samples(self, runs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        offsets = [self._offsets[begin : end + 1] for begin, end in runs]
        parts = self.file.read_parts(_BYTE, [(int(each[0]), int(each[-1] - each[0])) for each in offsets])
        samples = []
        for (begin, _), each, part in zip(runs, offsets, parts, strict=True):
            for number, sample in enumerate(split(part, each - each[0])):
                try:
                    samples.append(self._decoded(sample))
                except Exception as error:  # the package raises errors of many types
                    problem = f"sample {begin + number} is damaged: {error}"
                    raise self.file.error_at(int(each[number]), problem) from error
        return samples

    def _decoded(self, sample: NDArray[np.uint8]) -> dict[str, Any]:
        from streaming.base.format.mds.encodings import mds_decode

        front = 4 * len(self._varying)
        given = iter(sample[:front].view(_UINT32).tolist())
        bounds = list(accumulate((size or next(given) for size in self._sizes.values()), initial=front))
        if bounds[-1] != len(sample):
            raise ValueError(f"its columns and their sizes need {bounds[-1]:,} bytes, the sample has {len(sample):,}")
        parts = dict(zip(self._sizes, pairwise(bounds), strict=True))
        decoded = {}
        for name, dtype in self._dtypes.items():
            value = mds_decode(self._encodings[name], sample[slice(*parts[name])].tobytes())
            if isinstance(value, bytes):
                value = np.frombuffer(value, dtype)
            elif dtype is not None and value.ndim != 1:
                raise ValueError(f"column {name!r} must have one dimension, got shape {value.shape}")
            decoded[name] = value
        return decoded

    def _check_samples(self) -> None:
        """Columns of bytes must not hold tokens of a wider dtype than the given one, by some of the samples."""
        if self._is_checked or not len(self):
            return
        step = max(1, len(self) // _CHECKED)  # of the whole shard, which may be sorted by length
        samples = self._samples([(number, number + 1) for number in range(0, len(self), step)])
        for name, dtype in self._dtypes.items():
            if self._encodings[name] == "bytes":
                fitting = fitting_dtype([sample[name] for sample in samples])
                if fitting != dtype:
                    raise ValueError(f"dtype must be {fitting} for column {name!r} of {self.file.path}, got {dtype}")
        self._is_checked = True

    @cached_property
    def _offsets(self) -> IntArray:
        """The bytes where samples begin, and where the last one ends, (samples + 1,) int64."""
        self.file.check_size(self._bytes, f"{INDEX} says {self._bytes:,} bytes")
        count = int(self.file.read(_UINT32, 0, 1)[0])
        if count != len(self):
            raise self.file.error_at(0, f"the file has {count:,} samples, {INDEX} says {len(self):,}")
        offsets = self.file.read(_UINT32, 4, count + 1).astype(np.int64)
        is_valid = (np.diff(offsets, prepend=4 * (2 + count)) >= 0) & (offsets <= self._bytes)
        if not is_valid.all():
            number = int(np.argmin(is_valid))
            raise self.file.error_at(4 * (1 + number), f"sample {number} cannot begin at byte {offsets[number]:,}")
        return offsets


class _CompressedShard(DataFile):
    """A compressed shard. It is unpacked when it is first read, and kept among the copies of files at URLs."""

    def __init__(self, folder: AnyPath, shard: Any) -> None:
        super().__init__(folder / shard.raw_data.basename)
        self._bytes: int = shard.raw_data.bytes
        self._packed = DataFile(folder / shard.zip_data.basename)
        self._algorithm = _ALGORITHMS[shard.compression.partition(":")[0]]

    @cached_property
    def local(self) -> Path:
        if isinstance(self.path, Path) and self.path.exists():  # mosaicml-streaming has unpacked it
            return self.path
        packed, size = self._packed.local.resolve(), self._packed.size
        with chunk_errors(self._packed.path):
            path = folder_of_copy(packed, (size, packed.stat().st_mtime_ns)) / "file"
            if not path.exists():
                write_atomically(path, self._unpacked())
        return path

    def _unpacked(self) -> bytes:
        """The shard. cramjam, unlike mosaicml-streaming, writes no more bytes than the index says."""
        with needs("compressed MDS shards need cramjam", "seqwarm_kernels[mds]"):
            module = getattr(import_module("cramjam"), self._algorithm)
        unpack = getattr(module, "decompress_raw_into", module.decompress_into)  # snappy's is without frames
        buffer = np.empty(self._bytes, _BYTE)
        try:
            count = unpack(self._packed.read(_BYTE, 0, self._packed.size), buffer)
        except Exception as error:  # the package has its own
            problem = f"the compressed file is damaged, or has more than the {self._bytes:,} bytes of {INDEX}: {error}"
            raise self._packed.error(problem) from error
        if count != self._bytes:
            raise self._packed.error(f"unpacks to {count:,} bytes, {INDEX} says {self._bytes:,}")
        return buffer.tobytes()


def _bytes_of_shape(sizes: IntArray, itemsize: int) -> IntArray:
    """Bytes in front of the tokens of an ndarray: one, and 1, 2, 4 or 8, the fewest that hold the length."""
    widths = np.full(len(sizes), 8, np.int64)
    for width in (4, 2, 1):
        widths[sizes - 1 - width < itemsize * 2 ** (8 * width)] = width
    return 1 + widths
