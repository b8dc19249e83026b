"""Columns of Parquet files: texts or lists of tokens, and their lengths. Needs pyarrow. Errors name the row group."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...utils.checks import needs
from .lengths import MAX_LENGTH
from .reader import ChunkError, reason_of
from .remote import AnyPath, file_size, open_file, read_range

T = TypeVar("T")

SUFFIX = ".parquet"

#: Names of the columns that `write_chunks` writes.
TEXT_COLUMN, TOKENS_COLUMN, LENGTH_COLUMN = "text", "input_ids", "length"

_END = 2**16  #: bytes at the end of a file whose checksum tells its versions apart


class Footer(NamedTuple):
    rows: tuple[int, ...]  #: number of rows of each row group
    bytes: int  #: size of the file, as a change of its items is likely to show
    column: str  #: the column of items
    holds_tokens: bool  #: the items are lists of tokens, not texts


def check_pyarrow() -> None:
    """Raise an ImportError that says what to install, if Parquet files cannot be read."""
    with needs("Parquet files need pyarrow", "seqwarm_kernels[parquet]"):
        import pyarrow.parquet  # noqa: F401


def read_footer(path: AnyPath, column: str | None, length_column: str | None) -> Footer:
    """Read what the file's end says about its row groups, and check the columns.

    Args:
        column: the column of items. None: the only column besides "length" and `length_column`.

    Raises:
        ChunkError: The file is missing, damaged, truncated or not Parquet, or has other columns.
    """

    def read(opened: Any) -> tuple[Any, Any, int]:
        return opened.schema_arrow, opened.metadata, file_size(path)

    schema, metadata, size = _read(path, "the footer", read)
    found = _column_of(path, schema, column, length_column)
    kind = schema.field(found).type
    if length_column is not None:
        _check_column(path, schema, "length_column", length_column)
        if not _is_int(schema.field(length_column).type):
            raise ChunkError(
                path, None, f"column {length_column!r} must hold ints, got {schema.field(length_column).type}"
            )
    if not (_is_text(kind) or _is_tokens(kind)):
        raise ChunkError(path, None, f"column {found!r} must hold text or lists of ints, got {kind}")
    # In a damaged file a column of a row group may abort the process, so none is asked for its size.
    rows = tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
    return Footer(rows, size, found, not _is_text(kind))


def checksum_of_end(path: AnyPath, footer: Footer) -> int:
    """The checksum of the last 64 KiB of a file: its footer, and the last values before it.

    The footer alone does not change if rows of an uncompressed row group change their places.

    Raises:
        ChunkError: The file cannot be read.
    """
    with _naming(path, "the footer"):
        return zlib.crc32(read_range(path, max(0, footer.bytes - _END), footer.bytes))


def read_items(
    path: AnyPath, footer: Footer, group: int, length_column: str | None = None
) -> tuple[list[Any], NDArray[np.int64] | None]:
    """Read the items of a row group, strings or NumPy arrays of tokens, and their lengths.

    Returns:
        The items, and the lengths of `length_column` or of the arrays, (items,) int64. None for text without a column.

    Raises:
        ChunkError: The row group cannot be read, has other rows than `footer` says, or an item or length is invalid.
    """
    names = [footer.column] if length_column is None else [footer.column, length_column]
    values, *lengths = _read_columns(path, footer, group, names)
    stored = _checked_lengths(path, group, lengths[0]) if lengths else None
    if not footer.holds_tokens:
        with _naming(path, f"row group {group}"):
            return values.to_pylist(), stored
    tokens = values.flatten()
    if tokens.null_count:
        raise ChunkError(path, None, f"row group {group}: a token of column {footer.column!r} is null")
    counts, flat = _list_lengths(values), tokens.to_numpy()
    ends = np.cumsum(counts).tolist()
    items = [flat[end - count : end].copy() for end, count in zip(ends, counts.tolist(), strict=True)]
    return items, counts if stored is None else stored


def read_stored_lengths(path: AnyPath, footer: Footer, group: int, length_column: str | None) -> NDArray[np.int64]:
    """Read the lengths of a row group from a column, or those of its lists of tokens, (items,) int64.

    Raises:
        ChunkError: The row group cannot be read, or a length is invalid.
    """
    (values,) = _read_columns(path, footer, group, [length_column or footer.column])
    return _list_lengths(values) if length_column is None else _checked_lengths(path, group, values)


def _checked_lengths(path: AnyPath, group: int, values: Any) -> NDArray[np.int64]:
    lengths = values.to_numpy()
    for length in (lengths.min(initial=0), lengths.max(initial=0)):
        if not 0 <= length <= MAX_LENGTH:
            raise ChunkError(path, None, f"row group {group}: lengths must be from 0 to {MAX_LENGTH}, got {length}")
    return np.asarray(lengths, dtype=np.int64)


def _read_columns(path: AnyPath, footer: Footer, group: int, columns: list[str]) -> list[Any]:
    def read(opened: Any) -> list[Any]:
        table = opened.read_row_group(group, columns=columns)
        table.validate(full=True)
        return [table.column(name).combine_chunks() for name in columns]

    found = _read(path, f"row group {group}", read)
    for name, values in zip(columns, found, strict=True):
        if len(values) != footer.rows[group]:
            problem = f"row group {group}: {len(values)} rows, its footer said {footer.rows[group]}"
            raise ChunkError(path, None, problem)
        if values.null_count:
            row = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            raise ChunkError(path, None, f"row group {group}, row {row}: column {name!r} is null")
    return found


def _read(path: AnyPath, place: str, read: Callable[[Any], T]) -> T:
    """Call `read` with the opened file."""
    import pyarrow.parquet as pq

    with _naming(path, place), open_file(path) as file:
        return read(pq.ParquetFile(file, pre_buffer=True, page_checksum_verification=True))


def _list_lengths(values: Any) -> NDArray[np.int64]:
    import pyarrow.compute as pc

    return np.asarray(pc.list_value_length(values).to_numpy(zero_copy_only=False), dtype=np.int64)


@contextmanager
def _naming(path: AnyPath, place: str) -> Iterator[None]:
    """Errors of reading name the file and the place."""
    import pyarrow

    try:
        yield
    except FileNotFoundError as error:
        raise ChunkError(path, None, f"cannot be read: {reason_of(error)}") from error
    except (OSError, ValueError, OverflowError, MemoryError, pyarrow.ArrowException) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ChunkError(path, None, f"{place}: cannot be read: {reason}") from error


def _column_of(path: AnyPath, schema: Any, column: str | None, length_column: str | None) -> str:
    if column is not None:
        _check_column(path, schema, "column", column)
        return column
    candidates = [name for name in schema.names if name not in (LENGTH_COLUMN, length_column)]
    if len(candidates) != 1:
        raise ChunkError(
            path, None, f"column must name the column of items, one of {', '.join(schema.names) or 'none'}"
        )
    return str(candidates[0])


def _check_column(path: AnyPath, schema: Any, argument: str, name: str) -> None:
    if schema.names.count(name) != 1:
        raise ChunkError(path, None, f"{argument} must be one of the file's {', '.join(schema.names)}, got {name!r}")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_tokens(kind: Any) -> bool:
    from pyarrow import types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and _is_int(kind.value_type))


def _is_int(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind))
