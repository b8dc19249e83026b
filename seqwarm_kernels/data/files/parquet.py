"""Parquet files: columns of texts or lists of ints, and their lengths. Needs pyarrow.

pyarrow's data sets are not used: their error about a damaged page names neither file nor row group, and a read from a
store that failed is not tried again.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from ...utils.checks import needs
from .columns import Columns, as_columns, check_no_labels, names_of
from .manifest import MANIFEST, Manifest
from .reader import ChunkError, chunk_errors, reason_of
from .remote import AnyPath, check_named_once, file_size, open_file, read_range, visible_files
from .transfers import read_ahead

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
    length_column: str | None

    def items(self, group: int) -> list[Any]:
        """The items of a row group: strings or NumPy arrays, or dicts of these."""
        with _opened(self.path, f"row group {group}") as file:
            table = self._table(file, group, [*self.kinds])
            values = [_values(table.column(name), kind) for name, kind in self.kinds.items()]
        if isinstance(self.column, str):
            return values[0]
        return [dict(zip(self.kinds, row, strict=True)) for row in zip(*values, strict=True)]

    def lengths(self, group: int) -> NDArray[np.int64]:
        """The lengths of a row group: those in `length_column`, or of the lists in the first column, (items,) int64."""
        import pyarrow as pa
        import pyarrow.compute as pc

        with _opened(self.path, f"row group {group}") as file:
            column = self._table(file, group, [self.length_column or next(iter(self.kinds))]).column(0)
            lengths = pc.list_value_length(column) if self.length_column is None else column.cast(pa.uint32())
            return np.asarray(lengths, np.int64)

    @property
    def has_lengths(self) -> bool:
        return self.length_column is not None or next(iter(self.kinds.values())) == "tokens"

    def _table(self, file: Any, group: int, names: Sequence[str]) -> Any:
        """Columns of a row group, which have no nulls."""
        import pyarrow.compute as pc

        table = file.read_row_group(group, columns=names)
        table.validate(full=True)
        if len(table) != self.rows[group]:
            raise ValueError(f"{len(table)} rows, the footer said {self.rows[group]}")
        for name in names:
            column = table.column(name)
            nulls = column.null_count + (pc.list_flatten(column).null_count if _is_list_of_ints(column.type) else 0)
            if nulls:
                raise ValueError(f"column {name!r} has {nulls} nulls")
        return table

    @cached_property
    def lengths_path(self) -> AnyPath:
        """Where `count_lengths` keeps the lengths. A file with other row groups, of another size or with other last
        64 KiB has another path. Other changes are not noticed.
        """
        with chunk_errors(self.path):  # the footer alone does not change if uncompressed rows change their places
            end = zlib.crc32(read_range(self.path, max(0, self.bytes - _END), self.bytes))
        version = hashlib.sha256(repr((self.rows, self.bytes, end)).encode()).hexdigest()[:8]
        columns = ",".join(quote(name, safe="") for name in self.kinds)
        return self.path.with_name(f"{self.path.name[: -len(SUFFIX)]}.{columns}.{version}.lengths.npy")


def open_parquet_files(
    paths: list[AnyPath],
    column: str | Iterable[str] | None,
    length_column: str | None = None,
    skip: Callable[[ChunkError], None] | None = None,
) -> list[ParquetFile]:
    """Open the files of folders and files. `skip` is called for those that are damaged or have other columns."""
    columns = None if column is None else as_columns(column)

    def opened(path: AnyPath) -> ParquetFile | ChunkError:
        try:
            return open_parquet(path, columns, length_column)
        except ChunkError as error:
            return error

    check_pyarrow()
    files: list[ParquetFile] = []
    for found in read_ahead(opened, _find(paths)):
        if isinstance(found, ParquetFile) and files and found.kinds != files[0].kinds:
            found = ChunkError(found.path, None, f"has columns {found.kinds}, {files[0].path} has {files[0].kinds}")
        if isinstance(found, ParquetFile):
            files.append(found)
        elif skip is None:
            raise found
        else:
            skip(found)
    return files


def _find(paths: list[AnyPath]) -> list[AnyPath]:
    """The files of folders and files, which are not read."""
    files: list[AnyPath] = []
    for path in paths:
        has_suffix = path.name.lower().endswith(SUFFIX)
        # Spark writes folders with the suffix. A store would be asked once for each of many files.
        may_be_folder = not has_suffix or len(paths) == 1 or isinstance(path, Path)
        with chunk_errors(path):
            is_folder = may_be_folder and path.is_dir()
        if is_folder:
            files += _in_folder(path)
        elif has_suffix:
            files.append(path)
        else:
            raise ValueError(f"paths must be folders that exist, or end in {SUFFIX}, got {path}")
    check_named_once("paths", files, "file")
    return files


def _in_folder(folder: AnyPath) -> list[AnyPath]:
    if (folder / MANIFEST).exists():
        files = [folder / chunk.file for chunk in Manifest.read(folder).finished(folder)]
    else:
        files = visible_files(folder)
    files = [path for path in files if path.name.lower().endswith(SUFFIX)]
    if not files:
        raise ValueError(f"paths must hold {SUFFIX} files, the folder {folder} has none")
    return files


def open_parquet(path: AnyPath, column: Columns | None, length_column: str | None) -> ParquetFile:
    """Read the end of a file. Without `column`, items are in the only one besides "length" and `length_column`."""
    with _opened(path, "the footer") as file:
        schema = file.schema_arrow
        found = _only_column(schema.names, length_column) if column is None else column
        kinds = {name: _kind(schema.field(name)) for name in names_of(found)}
        if length_column is not None:
            schema.field(length_column)
        if isinstance(found, str) and kinds[found] == "tokens":
            check_no_labels(found, [field.name for field in schema if _is_list_of_ints(field.type)])
        # In a damaged file a column of a row group may abort the process, so none is asked for its size.
        rows = tuple(file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups))
        return ParquetFile(path, rows, file_size(path), found, kinds, length_column)


@contextmanager
def _opened(path: AnyPath, where: str) -> Iterator[Any]:
    """The opened file. Errors of reading it say `where`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_file(path) as file:
            yield pq.ParquetFile(file, pre_buffer=True, page_checksum_verification=True)
    except (KeyError, OSError, ValueError, OverflowError, MemoryError, pa.ArrowException) as error:
        reason = reason_of(error).strip().partition("\n")[0]
        raise ChunkError(path, None, f"{where}: {reason}") from error


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


def _values(column: Any, kind: str) -> list[Any]:
    """Strings, or arrays. These are copied, so that an item that is kept does not keep its row group in memory."""
    if kind == "text":
        return list(column.to_pylist())
    return [array.copy() for array in column.to_numpy()]
