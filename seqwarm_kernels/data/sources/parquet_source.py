"""A source over Parquet files, shuffled by row group and inside buffers of row groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..batch_planning.plan import IntArray
from ..files.lengths import check_lengths, read_lengths, write_lengths
from ..files.parquet_files import open_parquet_files
from ..files.reader import ChunkError
from ..files.remote import PathLike
from ..files.transfers import read_ahead
from .base import check_locations, fingerprint
from .chunked_source import ChunkedSource

_THREADS = 16
_WANTED = "folders or .parquet files"


class ParquetSource(ChunkedSource):
    """The rows of Parquet files: texts or lists of tokens from one column, or dicts from several.

    The row groups are shuffled, and the items inside each buffer of `buffer_chunks` row groups. Restoring reads the row
    groups of one buffer. The ranks read different row groups. Their number per rank differs by at most one. The footers
    of all files are read first, since they say how many row groups there are. Needs pyarrow.

    Args:
        paths: .parquet files, or folders that are searched for such files, in order; or one of them. Each may be a URL
            of fsspec, such as s3://bucket/folder; the row groups are then read ahead, one buffer at most.
        column: a column of text, or of lists of ints, which become NumPy arrays. A list of columns: items are dicts,
            such as {"input_ids": ..., "labels": ...} for the collators. A column of tokens that has labels or a mask of
            the loss beside it is an error, unless it is in a list. None: the only column besides "length" and
            `length_column`.
        length_column: the column of the items' lengths in tokens, for `with_lengths` and `lengths`. None: lengths that
            `count_lengths` has written, else the lengths of the lists in the first column.
        buffer_chunks: number of row groups that are in memory together and whose items are mixed.
        with_lengths: yield (item, length).
        on_error: what to do about a file or row group that is missing, damaged, or has other columns. "raise" raises
            a `ChunkError`. "skip" skips it with a warning and records the reason in `skipped`. A file whose footer is
            damaged is skipped as a whole, and a state of the same files without damage is rejected.
        order: the options of `Order`.

    Raises:
        ValueError: `paths` has fewer row groups than ranks, no files, a file twice, also as one of a folder, or a file
            with another suffix; or there are no lengths for `with_lengths`. A `ChunkError` names the file.
        ImportError: pyarrow is missing.
    """

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        column: str | Iterable[str] | None = None,
        *,
        length_column: str | None = None,
        buffer_chunks: int = 1,
        with_lengths: bool = False,
        on_error: str = "raise",
        **order: Any,
    ) -> None:
        self._length_column = length_column
        locations = check_locations("paths", paths, _WANTED)
        files, skipped = open_parquet_files(locations, column, length_column, on_error)
        self._files = [file for file in files if sum(file.rows)]
        self._groups = [(file, number) for file in files for number, rows in enumerate(file.rows) if rows]
        super().__init__(
            buffer_chunks=buffer_chunks,
            with_lengths=with_lengths,
            on_error=on_error,
            num_chunks=len(self._groups),
            reads_ahead=not all(isinstance(file.path, Path) for file in files),
            **order,
        )
        self.skipped |= skipped
        self._are_beside = with_lengths and self._lengths_are_beside()
        self._fingerprint = fingerprint([(file.path.name, file.rows, file.bytes) for file in files])

    def _lengths_are_beside(self) -> bool:
        """Whether `count_lengths` has written the lengths. Else a column or lists of tokens must tell them."""
        if self._length_column is not None:
            return False
        first = self._files[0]
        if first.holds_text and not first.lengths_path.exists():
            raise ValueError(f"{first.path} has no lengths: call count_lengths, or pass length_column")
        return first.lengths_path.exists()

    def lengths(self) -> IntArray:
        """The number of tokens of each item of all ranks, in the order of the files, (items,) int64.

        The items are not read if a column or `count_lengths` has the lengths.

        Raises:
            ValueError: There are no lengths.
            ChunkError: Lengths of a file are missing or cannot be read.
        """
        if self._lengths_are_beside():
            found = read_ahead(lambda file: read_lengths(file.lengths_path, sum(file.rows)), self._files, _THREADS)
        else:
            found = read_ahead(lambda group: group[0].lengths(group[1], self._length_column), self._groups, _THREADS)
        return np.concatenate([*found])

    def _load(self, chunk: int) -> list[Any]:
        file, number = self._groups[chunk]
        items, lengths = file.items(number, self._length_column if self.with_lengths else None)
        if not self.with_lengths:
            return items
        if self._are_beside:
            first = sum(file.rows[:number])
            lengths = read_lengths(file.lengths_path, sum(file.rows), first, first + len(items))
        assert lengths is not None
        return list(zip(items, lengths.tolist(), strict=True))

    def _name_of(self, chunk: int) -> str:
        file, number = self._groups[chunk]
        return f"{file.path}, row group {number}"

    def _configuration(self) -> dict[str, Any]:
        column = self._files[0].column
        as_json = column if isinstance(column, str) else list(column)
        return {**super()._configuration(), "column": as_json, "files": self._fingerprint}


def count_lengths(
    paths: PathLike | Iterable[PathLike], length_fn: Callable[[Any], int], column: str | Iterable[str] | None = None
) -> None:
    """Count the tokens of each item of Parquet files once, and keep the lengths in a file beside each.

    `ParquetSource` with `with_lengths` reads them. After an interruption, call the function again: files with lengths
    are left as they are, and the lengths of a few of their items are counted again and compared. A file whose row
    groups, size or last 64 KiB have changed is counted again. Several processes may count the same files at once.

    Args:
        paths, column: as for `ParquetSource`.
        length_fn: counts an item's tokens.

    Raises:
        ValueError: there are no files, one is named twice or cannot be read, or `length_fn` returns something else than
            a length, or another one than was counted before.
    """
    files, _ = open_parquet_files(check_locations("paths", paths, _WANTED), column, None, "raise")
    for file in files:
        if not (groups := [number for number, rows in enumerate(file.rows) if rows]):
            continue
        items, target = (file.items(number)[0] for number in groups), file.lengths_path
        try:
            counted = read_lengths(target, sum(file.rows))
        except ChunkError:
            write_lengths(target, chain.from_iterable(items), length_fn)
        else:
            check_lengths(target, next(items), counted, length_fn, f"delete {target} to count again")
