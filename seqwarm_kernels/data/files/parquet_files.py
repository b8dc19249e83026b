"""Data sets of Parquet files: finding the files and opening them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .columns import Columns
from .manifest import MANIFEST, Manifest
from .parquet import SUFFIX, ParquetFile, check_pyarrow, open_parquet
from .reader import ChunkError, chunk_errors
from .remote import AnyPath, check_named_once, visible_files
from .transfers import read_ahead

_THREADS = 16


def open_parquet_files(
    paths: list[AnyPath], column: Columns | None, length_column: str | None
) -> Iterator[ParquetFile | ChunkError]:
    """Open the files of folders and files. An error takes the place of a file that cannot be read or differs in kind.

    Raises:
        ValueError: There are no files, or one is named twice.
    """

    def opened(path: AnyPath) -> ParquetFile | ChunkError:
        try:
            return open_parquet(path, column, length_column)
        except ChunkError as error:
            return error

    check_pyarrow()
    first = None
    for found in read_ahead(opened, _find(paths), _THREADS):
        if isinstance(found, ParquetFile):
            first = first or found
            if found.kinds != first.kinds:
                found = ChunkError(found.path, None, f"has columns {found.kinds}, {first.path} has {first.kinds}")
        yield found


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
        chunks = Manifest.read(folder).chunks
        if chunks is None:
            raise ValueError(f"write_chunks has not finished {folder}: call it again with the same items")
        files = [folder / chunk.file for chunk in chunks]
    else:
        files = visible_files(folder)
    files = [path for path in files if path.name.lower().endswith(SUFFIX)]
    if not files:
        raise ValueError(f"paths must hold {SUFFIX} files, the folder {folder} has none")
    return files
