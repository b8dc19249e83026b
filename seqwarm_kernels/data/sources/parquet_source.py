"""A source over Parquet files, shuffled by row group and inside buffers of row groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from ..batch_planning.plan import IntArray
from ..files import parquet
from ..files.lengths import check_lengths, read_lengths, read_some_lengths, write_lengths
from ..files.parquet_files import ParquetFile, RowGroup, find_parquet_files, read_footers
from ..files.reader import ChunkError
from ..files.remote import PathLike, RemotePath
from ..files.transfers import read_ahead
from .base import fingerprint
from .chunked_source import ChunkedSource

_THREADS = 16


class ParquetSource(ChunkedSource):
    """The items of a column of Parquet files: texts, or lists of tokens as NumPy arrays.

    The row groups are shuffled, and the items inside each buffer of `buffer_chunks` row groups. Restoring reads the row
    groups of one buffer. The ranks read different row groups. Their number per rank differs by at most one. The footers
    of all files are read first, since they say how many row groups there are. Needs pyarrow.

    Args:
        paths: .parquet files, or folders that are searched for such files, in order; or one of them. Each may be a URL
            of fsspec, such as s3://bucket/folder; the row groups are then read ahead, one buffer at most.
        column: the column of items, of text or lists of ints. None: the only column besides "length" and
            `length_column`.
        length_column: the column of the items' lengths in tokens, for `with_lengths` and `lengths`. None: lengths that
            `count_lengths` has written, else the lengths of the lists of tokens.
        buffer_chunks: number of row groups that are in memory together and whose items are mixed.
        with_lengths: yield (item, length).
        on_error: what to do about a file or row group that is missing, damaged, or has other columns. "raise" raises
            a `ChunkError`. "skip" skips it with a warning and records the reason in `skipped`. A file whose footer is
            damaged is skipped as a whole, and a state of the same files without damage is rejected.
        order: the options of `Order`.

    Raises:
        TypeError: `paths` is neither a path nor a list of paths, or a setting has the wrong type.
        ValueError: `paths` has fewer row groups than ranks, no files, a file twice, also as one of a folder, or a file
            with another suffix; there are no lengths for `with_lengths`; or a setting is out of range. A `ChunkError`
            names the file.
        ImportError: pyarrow is missing.
    """

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        column: str | None = None,
        *,
        length_column: str | None = None,
        buffer_chunks: int = 1,
        with_lengths: bool = False,
        on_error: str = "raise",
        **order: Any,
    ) -> None:
        check_column("column", column)
        check_column("length_column", length_column)
        self._length_column = length_column
        files, skipped = read_footers(find_parquet_files(paths), column, length_column, on_error)
        self._files = [file for file in files if file.rows]
        self._groups = [group for file in self._files for group in file.row_groups()]
        if not self._groups:
            raise ValueError(f"paths must hold items, the files have none, such as {files[0].path}")
        super().__init__(
            buffer_chunks=buffer_chunks,
            with_lengths=with_lengths,
            on_error=on_error,
            num_chunks=len(self._groups),
            reads_ahead=any(isinstance(file.path, RemotePath) for file in files),
            **order,
        )
        self.skipped |= skipped
        if with_lengths:
            self._check_has_lengths("with_lengths")
        self._fingerprint = fingerprint([(file.path.name, file.footer.rows, file.footer.bytes) for file in files])

    @cached_property
    def _lengths_are_beside(self) -> bool:
        """Texts without a column of lengths need those of `count_lengths`. Lists of tokens can do without them."""
        first = self._files[0]
        return self._length_column is None and (not first.footer.holds_tokens or first.lengths_path.exists())

    def _check_has_lengths(self, user: str) -> None:
        first = self._files[0]
        if self._lengths_are_beside and not first.lengths_path.exists():
            raise ValueError(
                f"{user} needs lengths, {first.path} has none: call count_lengths, or name their column with "
                "length_column"
            )

    def lengths(self) -> IntArray:
        """The number of tokens of each item of all ranks, in the order of the files, (items,) int64.

        The items are not read if a column or `count_lengths` has the lengths.

        Raises:
            ValueError: There are no lengths.
            ChunkError: Lengths of a file are missing or cannot be read.
        """
        self._check_has_lengths("lengths()")
        if self._lengths_are_beside:
            found = read_ahead(lambda file: read_lengths(file.lengths_path, file.rows), self._files, _THREADS)
        else:
            found = read_ahead(self._read_stored_lengths, self._groups, _THREADS)
        return np.concatenate([*found])

    def _read_stored_lengths(self, group: RowGroup) -> IntArray:
        return parquet.read_stored_lengths(group.file.path, group.file.footer, group.number, self._length_column)

    def _load(self, chunk: int) -> list[Any]:
        file, number, *rows = self._groups[chunk]
        length_column = self._length_column if self.with_lengths else None
        items, lengths = parquet.read_items(file.path, file.footer, number, length_column)
        if self.with_lengths and self._lengths_are_beside:
            lengths = read_some_lengths(file.lengths_path, file.rows, *rows)
        return list(zip(items, lengths.tolist(), strict=True)) if self.with_lengths else items  # type: ignore[union-attr]

    def _name_of(self, chunk: int) -> str:
        group = self._groups[chunk]
        return f"{group.file.path}, row group {group.number}"

    def _configuration(self) -> dict[str, Any]:
        column = self._files[0].footer.column
        return {**super()._configuration(), "column": column, "files": self._fingerprint}


def count_lengths(
    paths: PathLike | Iterable[PathLike], length_fn: Callable[[Any], int], column: str | None = None
) -> None:
    """Count the tokens of each item of Parquet files once, and keep the lengths in a file beside each.

    `ParquetSource` with `with_lengths` reads them. After an interruption, call the function again: files with lengths
    are left as they are, and the lengths of a few of their items are counted again and compared. A file whose row
    groups, size or last 64 KiB have changed is counted again. Several processes may count the same files at once.

    Args:
        paths, column: as for `ParquetSource`.
        length_fn: counts an item's tokens.

    Raises:
        TypeError: `paths` is neither a path nor a list of paths, or `length_fn` is not a function.
        ValueError: there are no files, one is named twice or cannot be read, or `length_fn` returns something else than
            a length, or another one than was counted before.
    """
    if not callable(length_fn):
        raise TypeError(f"length_fn must be a function of an item, got {type(length_fn).__name__}")
    check_column("column", column)
    files, _ = read_footers(find_parquet_files(paths), column, None, "raise")
    for file in files:
        if file.rows:
            _count_lengths(file, length_fn)


def _count_lengths(file: ParquetFile, length_fn: Callable[[Any], int]) -> None:
    items = (parquet.read_items(file.path, file.footer, group.number)[0] for group in file.row_groups())
    target = file.lengths_path
    try:
        counted = read_lengths(target, file.rows)
    except ChunkError:
        write_lengths(target, chain.from_iterable(items), length_fn)
    else:
        check_lengths(target, next(items), counted, length_fn, f"delete {target} to count again")


def check_column(name: str, value: object) -> None:
    if not isinstance(value, (str, type(None))):
        raise TypeError(f"{name} must be the name of a column, got {type(value).__name__}")
