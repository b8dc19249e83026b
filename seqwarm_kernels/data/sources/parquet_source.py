"""A source over Parquet files, shuffled by row group and inside buffers of row groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from ..batch_planning.plan import IntArray
from ..files.lengths import as_lengths, check_lengths, read_lengths
from ..files.parquet import ParquetFile, open_parquet_files
from ..files.reader import ChunkError
from ..files.remote import PathLike, write_file
from .base import check_locations
from .chunk_source import ChunkedSource

_WANTED = "folders or .parquet files"


class _RowGroup(NamedTuple):
    file: ParquetFile
    number: int

    def __str__(self) -> str:
        return f"{self.file.path}, row group {self.number}"


class ParquetSource(ChunkedSource):
    """The rows of Parquet files: texts or lists of tokens from one column, or dicts from several.

    The row groups are shuffled, and the items inside each buffer of `buffer_chunks` row groups. Restoring reads the row
    groups of one buffer. The ranks read different row groups. Their number per rank differs by at most one. The footers
    of all files are read first. Needs pyarrow.

    Args:
        paths: .parquet files, or folders that are searched for such files, in order; or one of them. Each may be a URL
            of fsspec, such as s3://bucket/folder; the row groups are then read ahead, one buffer at most.
        column: a column of text, or of lists of ints, which become NumPy arrays. A list of columns: items are dicts,
            such as {"input_ids": ..., "labels": ...} for the collators. A column of tokens that has labels or a mask of
            the loss beside it must be in a list. None: the only column besides "length" and `length_column`.
        length_column: the column of the items' lengths in tokens, for `with_lengths` and `lengths`. None: lengths that
            `count_lengths` has written, else the lengths of the lists in the first column.
        buffer_chunks: number of row groups that are in memory together and whose items are mixed.
        with_lengths: yield (item, length).
        on_error: what to do about a file or row group that is missing, damaged, or has other columns. "raise" raises
            a `ChunkError`. "skip" skips it with a warning and records the reason in `skipped`. A file whose footer is
            damaged is skipped as a whole, and a state of the same files without damage is rejected.
        order: the options of `Order`.

    Raises:
        ValueError: there are fewer row groups than ranks, a file is named twice or has another suffix, a folder is
            missing or has no files, or there are no lengths for `with_lengths`.
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
        super().__init__(buffer_chunks=buffer_chunks, with_lengths=with_lengths, on_error=on_error, **order)
        files = open_parquet_files(check_locations("paths", paths, _WANTED), column, length_column, self._skip)
        row_groups = [_RowGroup(file, number) for file in files for number, rows in enumerate(file.rows) if rows]
        facts = [(file.path.name, file.rows, file.bytes) for file in files]
        self._set_chunks(row_groups, [file.path for file in files], facts)
        found_column = row_groups[0].file.column
        self._settings["column"] = found_column if isinstance(found_column, str) else list(found_column)

    @cached_property
    def _are_beside(self) -> bool:
        """Whether `count_lengths` has written the lengths. Else a column or lists of tokens tell them."""
        first = self._chunks[0].file
        return first.length_column is None and first.lengths_path.exists()

    def _check_has_lengths(self) -> None:
        first = self._chunks[0].file
        if not first.has_lengths and not self._are_beside:
            raise ValueError(f"{first.path} has no lengths: call count_lengths, or pass length_column")

    def _items(self, chunk: _RowGroup) -> list[Any]:
        return chunk.file.items(chunk.number)

    def _lengths(self, chunk: _RowGroup) -> IntArray:
        file, number = chunk
        if not self._are_beside:
            return file.lengths(number)
        begin = sum(file.rows[:number])
        return read_lengths(file.lengths_path, sum(file.rows), begin, begin + file.rows[number])


def count_lengths(
    paths: PathLike | Iterable[PathLike], length_fn: Callable[[Any], int], column: str | Iterable[str] | None = None
) -> None:
    """Count the tokens of each item of Parquet files once, and keep the lengths in a file beside each.

    `ParquetSource` with `with_lengths` reads them. After an interruption, call the function again: files with lengths
    are left as they are, and the lengths of a few of their items are counted again and compared: delete the file of
    lengths to count with another function. A file whose row groups, size or last 64 KiB have changed is counted again.
    Several processes may count the same files at once.

    Args:
        paths, column: as for `ParquetSource`.
        length_fn: counts an item's tokens.

    Raises:
        ValueError: a file cannot be read, or `length_fn` returns another length than was counted before.
    """
    for file in open_parquet_files(check_locations("paths", paths, _WANTED), column):
        if not (groups := [number for number, rows in enumerate(file.rows) if rows]):
            continue
        items, target = (file.items(number) for number in groups), file.lengths_path
        try:
            counted = read_lengths(target, sum(file.rows))
        except ChunkError:
            write_file(target, as_lengths(chain.from_iterable(items), length_fn))
        else:
            check_lengths(target, next(items), counted, length_fn)
