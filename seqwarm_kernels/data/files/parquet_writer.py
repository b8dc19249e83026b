"""Write chunks as Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .lengths import check_lengths, count_length
from .parquet import LENGTH_COLUMN, TEXT_COLUMN, TOKENS_COLUMN, open_parquet
from .reader import ChunkError
from .remote import AnyPath

_CODECS = {"none": "none", "gz": "gzip", "zst": "zstd"}
_LEVEL = 6  #: of compression, as for other chunk files


def column_of(item: Any) -> str:
    """The column of a file for items such as this one."""
    return TEXT_COLUMN if isinstance(item, str) else TOKENS_COLUMN


def has_parquet_items(path: AnyPath, items: Sequence[Any], column: str, length_fn: Callable[[Any], int] | None) -> bool:
    """Whether the file has these items. False if it is missing or damaged: it is then written again."""
    try:
        file = open_parquet(path, None, None if length_fn is None else LENGTH_COLUMN)
        found = file.items(0)
        if len(found) != len(items) or not all(map(_same, found, items)):
            raise ValueError(f"{path} holds other items than these; write them into another folder")
        if length_fn is not None:
            check_lengths(path, items, file.lengths(0), length_fn)
    except ChunkError:
        return False
    return file.column == column


def _same(stored: Any, item: Any) -> bool:
    return stored == item if isinstance(stored, str) or isinstance(item, str) else np.array_equal(stored, item)


def as_parquet(items: Sequence[Any], column: str, compression: str, length_fn: Callable[[Any], int] | None) -> bytes:
    """The content of a file of one row group: the items in a column, and their lengths in a column "length"."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for item in items:
        if column_of(item) != column:
            raise _not_held(item)
    columns = {column: pa.array(items, pa.string()) if column == TEXT_COLUMN else _token_lists(items)}
    if length_fn is not None:
        columns[LENGTH_COLUMN] = pa.array([count_length(length_fn, item) for item in items], pa.uint32())
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table(columns),
        sink,
        row_group_size=len(items),
        compression=_CODECS[compression],
        compression_level=None if compression == "none" else _LEVEL,
        write_page_checksum=True,
    )
    return bytes(sink.getvalue())


def _not_held(item: Any) -> TypeError:
    return TypeError(f"items must be all texts or all lists of ints for format 'parquet', got {item!r:.60}")


def _token_lists(items: Sequence[Any]) -> Any:
    import pyarrow as pa

    # pyarrow would make ints of floats
    arrays = [np.asarray(item) for item in items]
    for item, array in zip(items, arrays, strict=True):
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise _not_held(item)
    flat = np.concatenate([array.astype(np.int64, copy=False) for array in arrays])
    short = flat.astype(np.int32)
    offsets = np.cumsum([0, *map(len, arrays)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(short if (short == flat).all() else flat))
