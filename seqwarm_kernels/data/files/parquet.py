"""Parquet files: columns of texts or lists of ints, and their lengths. Needs pyarrow. Errors name the row group."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from ...utils.checks import needs
from .columns import Columns, check_no_labels, names_of
from .reader import ChunkError, reason_of
from .remote import AnyPath, file_size, open_file, read_range

T = TypeVar("T")

SUFFIX = ".parquet"

#: Names of the columns that `write_chunks` writes.
TEXT_COLUMN, TOKENS_COLUMN, LENGTH_COLUMN = "text", "input_ids", "length"

_END = 2**16  #: bytes at the end of a file whose checksum tells its versions apart


def check_pyarrow() -> None:
    """Raise an ImportError that says what to install, if Parquet files cannot be read."""
    with needs("Parquet files need pyarrow", "seqwarm_kernels[parquet]"):
        import pyarrow.parquet  # noqa: F401


@dataclass(frozen=True)
class ParquetFile:
    """What the end of a file says. Values of rows are read a row group at a time, and errors are `ChunkError`s."""

    path: AnyPath
    rows: tuple[int, ...]  #: number of rows of each row group
    bytes: int  #: size of the file, as a change of its items is likely to show
    column: Columns
    kinds: dict[str, str]  #: name of a column of items -> "text", or "tokens", which are lists of ints

    def items(self, group: int, length_column: str | None = None) -> tuple[list[Any], NDArray[np.int64] | None]:
        """The items of a row group: strings or NumPy arrays, or dicts of these.

        Returns:
            The items. Their lengths in `length_column`, or those of the arrays in the first column, (items,) int64;
            None for text without a column of lengths.
        """
        columns = self._read(group, [*self.kinds, *([length_column] if length_column else [])], length_column)
        lengths = _lengths(columns[length_column or self.first]) if length_column or not self.holds_text else None
        values = [_values(columns[name]) for name in self.kinds]
        if isinstance(self.column, str):
            return values[0], lengths
        return [dict(zip(self.kinds, row, strict=True)) for row in zip(*values, strict=True)], lengths

    def lengths(self, group: int, length_column: str | None) -> NDArray[np.int64]:
        """The lengths of a row group in a column, or those of the lists in its first column, (items,) int64."""
        name = length_column or self.first
        return _lengths(self._read(group, [name], length_column)[name])

    @property
    def first(self) -> str:
        """The column that tells lengths."""
        return next(iter(self.kinds))

    @property
    def holds_text(self) -> bool:
        return self.kinds[self.first] == "text"

    def _read(self, group: int, names: Sequence[str], length_column: str | None) -> dict[str, Any]:
        """Columns without nulls, that of lengths as uint32."""

        def read(file: Any) -> dict[str, Any]:
            import pyarrow as pa

            table = file.read_row_group(group, columns=names)
            table.validate(full=True)
            if len(table) != self.rows[group]:
                raise ValueError(f"{len(table)} rows, the footer said {self.rows[group]}")
            columns = {name: table.column(name).combine_chunks() for name in names}
            for name, column in columns.items():
                nulls = column.null_count + (column.flatten().null_count if _is_list_of_ints(column.type) else 0)
                if nulls:
                    raise ValueError(f"column {name!r} has {nulls} nulls")
            if length_column is not None:
                columns[length_column] = columns[length_column].cast(pa.uint32())
            return columns

        return _read(self.path, f"row group {group}", read)

    @cached_property
    def lengths_path(self) -> AnyPath:
        """Where `count_lengths` keeps the lengths. A file with other row groups, of another size or with other last
        64 KiB has another path. Other changes are not noticed.
        """
        try:  # the footer alone does not change if rows of an uncompressed row group change their places
            end = zlib.crc32(read_range(self.path, max(0, self.bytes - _END), self.bytes))
        except OSError as error:
            raise ChunkError(self.path, None, f"cannot be read: {error}") from error
        version = hashlib.sha256(repr((self.rows, self.bytes, end)).encode()).hexdigest()[:8]
        columns = ",".join(quote(name, safe="") for name in self.kinds)
        return self.path.with_name(f"{self.path.name[: -len(SUFFIX)]}.{columns}.{version}.lengths.npy")


def open_parquet(path: AnyPath, column: Columns | None, length_column: str | None) -> ParquetFile:
    """Read the end of a file, and check the columns.

    Args:
        column: the columns of items. None: the only column besides "length" and `length_column`.

    Raises:
        ChunkError: The file is missing, damaged, truncated or not Parquet, or has other columns.
    """

    def read(opened: Any) -> ParquetFile:
        schema = opened.schema_arrow
        found = column or _only_column(schema.names, length_column)
        for argument, name in [*(("column", each) for each in names_of(found)), ("length_column", length_column)]:
            if name is not None and schema.get_field_index(name) < 0:
                raise ValueError(f"{argument} must be one of the file's {', '.join(schema.names)}, got {name!r}")
        kinds = {name: _kind(schema.field(name)) for name in names_of(found)}
        if isinstance(found, str) and kinds[found] == "tokens":
            check_no_labels(found, [field.name for field in schema if _is_list_of_ints(field.type)])
        # In a damaged file a column of a row group may abort the process, so none is asked for its size.
        groups = range(opened.metadata.num_row_groups)
        rows = tuple(opened.metadata.row_group(number).num_rows for number in groups)
        return ParquetFile(path, rows, file_size(path), found, kinds)

    return _read(path, "the footer", read)


def _read(path: AnyPath, place: str, read: Callable[[Any], T]) -> T:
    """Call `read` with the opened file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_file(path) as file:
            return read(pq.ParquetFile(file, pre_buffer=True, page_checksum_verification=True))
    except FileNotFoundError as error:
        raise ChunkError(path, None, f"cannot be read: {reason_of(error)}") from error
    except (OSError, ValueError, OverflowError, MemoryError, pa.ArrowException) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ChunkError(path, None, f"{place}: {reason}") from error


def _only_column(names: Sequence[str], length_column: str | None) -> str:
    candidates = [name for name in names if name not in (LENGTH_COLUMN, length_column)]
    if len(candidates) != 1:
        raise ValueError(f"column must name the columns of items, the file has {', '.join(names)}")
    return candidates[0]


def _kind(field: Any) -> str:
    from pyarrow import types

    if _is_list_of_ints(field.type):
        return "tokens"
    kind = field.type.value_type if types.is_dictionary(field.type) else field.type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    raise ValueError(f"column {field.name!r} must hold text or lists of ints, got {field.type}")


def _is_list_of_ints(kind: Any) -> bool:
    from pyarrow import types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and (types.is_integer(kind.value_type) or types.is_boolean(kind.value_type)))


def _values(column: Any) -> list[Any]:
    """Strings, or arrays. These are copied, so that an item that is kept does not keep its row group in memory."""
    if not _is_list_of_ints(column.type):
        return list(column.to_pylist())
    return [array.copy() for array in column.to_numpy(zero_copy_only=False)]


def _lengths(column: Any) -> NDArray[np.int64]:
    """The values of a column of lengths, or the lengths of lists."""
    import pyarrow.compute as pc

    return np.asarray(pc.list_value_length(column) if _is_list_of_ints(column.type) else column, dtype=np.int64)
