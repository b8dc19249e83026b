"""Data sets of Parquet files: finding the files, their footers and row groups, and where their lengths are kept."""

from __future__ import annotations

import hashlib
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple
from urllib.parse import quote

from ...utils.checks import check_iterable
from .manifest import MANIFEST, Manifest
from .parquet import SUFFIX, Footer, check_pyarrow, checksum_of_end, read_footer
from .reader import ChunkError
from .remote import AnyPath, RemotePath, check_location, check_named_once, is_path, visible_files

_THREADS = 16


@dataclass(frozen=True)
class ParquetFile:
    path: AnyPath
    footer: Footer

    @property
    def rows(self) -> int:
        return sum(self.footer.rows)

    def row_groups(self) -> list[RowGroup]:
        """The row groups that have rows."""
        ends = accumulate(self.footer.rows)
        groups = enumerate(zip(self.footer.rows, ends, strict=True))
        return [RowGroup(self, number, end - rows, end) for number, (rows, end) in groups if rows]

    @cached_property
    def lengths_path(self) -> AnyPath:
        """Where `count_lengths` keeps the lengths. A file with other row groups, of another size or with other last
        64 KiB has another path. Other changes are not noticed.
        """
        facts = (self.footer.rows, self.footer.bytes, checksum_of_end(self.path, self.footer))
        version = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
        column = quote(self.footer.column, safe="")
        return self.path.with_name(f"{self.path.name[: -len(SUFFIX)]}.{column}.{version}.lengths.npy")


class RowGroup(NamedTuple):
    file: ParquetFile
    number: int  #: in the file
    first_row: int
    end_row: int


def find_parquet_files(paths: Any) -> list[AnyPath]:
    """The files of `paths`, which are not read."""
    check_pyarrow()
    paths = [paths] if is_path(paths) else paths
    check_iterable("paths", paths, f"folders or {SUFFIX} files")
    locations = [check_location("each of paths", path) for path in paths]
    files: list[AnyPath] = []
    for path in locations:
        has_suffix = path.name.lower().endswith(SUFFIX)
        # Spark writes folders with the suffix. A store would be asked once for each of many files.
        may_be_folder = not has_suffix or len(locations) == 1 or not isinstance(path, RemotePath)
        if may_be_folder and path.is_dir():
            files += _in_folder(path)
        elif has_suffix:
            files.append(path)
        else:
            raise ValueError(f"paths must be folders or end in {SUFFIX}, got {path}")
    if not files:
        raise ValueError("paths must name at least one file, got none")
    check_named_once("paths", files, "file")
    return files


def _in_folder(folder: AnyPath) -> list[AnyPath]:
    if (folder / MANIFEST).exists():
        manifest = Manifest.read(folder)
        if manifest.format != "parquet":
            raise ValueError(f"paths must hold {SUFFIX} files, {folder} holds chunk files of text: use ChunkSource")
        if manifest.chunks is None:
            raise ValueError(f"write_chunks has not finished {folder}: call it again with the same items")
        return [folder / chunk.file for chunk in manifest.chunks]
    files = [path for path in visible_files(folder) if path.name.lower().endswith(SUFFIX)]
    if not files:
        raise ValueError(f"paths must hold {SUFFIX} files, the folder {folder} has none")
    return files


def read_footers(
    paths: list[AnyPath], column: str | None, length_column: str | None, on_error: str
) -> tuple[list[ParquetFile], dict[str, str]]:
    """Read the footers of files, whose columns of items must be of one kind.

    Returns:
        The files, and the reasons why others were skipped.

    Raises:
        ChunkError: A file cannot be read or has other columns, and `on_error` is "raise".
        ValueError: All files were skipped.
    """

    def read(path: AnyPath) -> Footer | ChunkError:
        try:
            return read_footer(path, column, length_column)
        except ChunkError as error:
            return error

    files: list[ParquetFile] = []
    skipped: dict[str, str] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for path, footer in zip(paths, pool.map(read, paths), strict=True):
            outcome = _of_one_kind(path, footer, files)
            if isinstance(outcome, Footer):
                files.append(ParquetFile(path, outcome))
            elif on_error == "raise":
                raise outcome
            else:
                warnings.warn(f"skipped: {outcome}", stacklevel=3)
                skipped[str(path)] = str(outcome)
    if not files:
        raise ValueError(f"paths must hold a file that can be read, all {len(paths)} were skipped")
    return files, skipped


def _of_one_kind(path: AnyPath, footer: Footer | ChunkError, before: list[ParquetFile]) -> Footer | ChunkError:
    if isinstance(footer, ChunkError) or not before:
        return footer
    first = before[0]
    if (footer.column, footer.holds_tokens) == (first.footer.column, first.footer.holds_tokens):
        return footer
    return ChunkError(path, None, f"holds {_kind(footer)}, expected {_kind(first.footer)} as in {first.path}")


def _kind(footer: Footer) -> str:
    return f"column {footer.column!r} of {'tokens' if footer.holds_tokens else 'text'}"
