"""Data sets whose files know the lengths of their items, opened by what lies at a path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..batch_planning.plan import IntArray
from ..files.manifest import MANIFEST, Manifest
from ..files.mds import INDEX
from ..files.parquet import LENGTH_COLUMN
from ..files.parquet import SUFFIX as PARQUET_SUFFIX
from ..files.remote import AnyPath, PathLike, visible_files
from ..sources.chunk_source import ChunkSource
from ..sources.document_source import check_locations
from ..sources.mds_source import MDSSource
from ..sources.megatron_source import MegatronSource
from ..sources.parquet_source import ParquetSource
from ..sources.token_source import TokenSource


class _Kind(NamedTuple):
    source: Any  #: class of the source
    several: bool  #: whether it takes a list of paths
    options: tuple[str, ...]  #: its options, among those of `DataSet`
    token_kind: str  #: what a length counts


_CHUNKS = _Kind(ChunkSource, False, (), "as counted when the chunks were written")
_MDS = _Kind(MDSSource, True, ("column", "dtype"), "those of the column, or the bytes of text")
_MEGATRON = _Kind(MegatronSource, True, (), "those of the files")
_PARQUET = _Kind(
    ParquetSource,
    True,
    ("column", "length_column"),
    "those of the lists or of the column of lengths",
)
_TOKENS = _Kind(
    TokenSource,
    True,
    ("end_token", "start_token", "document_ends", "dtype", "index_folder"),
    "those of the files",
)


class DataSet:
    """The lengths of the items of a data set, which its files tell without reading the items.

    Args:
        paths: a folder of `write_chunks` with lengths, folders of MDS shards, data sets of Megatron without or with
            their suffix, Parquet files or a folder of them, or files for `TokenSource`. All are of one kind.
        options: options of the source: `column`, `length_column`, `dtype`, `end_token`, `start_token`,
            `document_ends`, `index_folder`. None: default.

    Raises:
        TypeError: `paths` are not paths.
        ValueError: a file is missing or damaged, or an option is missing, invalid or not for this kind of data set.
        ImportError: a package is missing that reads the files.
    """

    unit = "document"

    def __init__(self, paths: PathLike | Iterable[PathLike], options: Mapping[str, Any] | None = None) -> None:
        self.paths = check_locations("paths", paths, "the files or folders of a data set")
        kind, implied = _kind_of(self.paths[0])
        given = {name: value for name, value in (options or {}).items() if value is not None}
        unknown = next((name for name in given if name not in kind.options), None)
        if unknown is not None:
            raise ValueError(f"{unknown} is not an option of {kind.source.__name__}, which reads {self.paths[0]}")
        if not kind.several and len(self.paths) > 1:
            raise ValueError(f"paths must be one folder of write_chunks, got {len(self.paths)} paths")
        if "column" in given:
            given["column"] = [given["column"]]  # labels beside it do not matter here
        source = kind.source(self.paths if kind.several else self.paths[0], **{**implied, **given})
        self.token_kind = kind.token_kind
        self._source_name = kind.source.__name__
        self.lengths: IntArray = source.lengths()  #: (items,) int64
        if not len(self.lengths):
            raise ValueError(f"no documents found in {', '.join(map(str, self.paths))}")

    def about(self) -> list[str]:
        """The data set in sentences."""
        paths = ", ".join(map(str, self.paths[:3])) + (", ..." if len(self.paths) > 3 else "")
        return [f"{len(self.lengths):,} documents in {paths}, read by {self._source_name}."]

    def facts(self) -> dict[str, Any]:
        """The data set as plain values."""
        return {"unit": self.unit, "source": self._source_name, "paths": list(map(str, self.paths))}


def _kind_of(path: AnyPath) -> tuple[_Kind, dict[str, Any]]:
    """The kind of a data set, and options that its files imply."""
    if path.is_dir():
        return _kind_of_folder(path)
    if path.name.lower().endswith(PARQUET_SUFFIX):
        return _PARQUET, {}
    name = path.name.removesuffix(".bin").removesuffix(".idx")
    if path.with_name(f"{name}.idx").exists():
        return _MEGATRON, {}
    if not path.exists():
        raise ValueError(f"no such file or folder: {path}")
    return _TOKENS, {}


def _kind_of_folder(folder: AnyPath) -> tuple[_Kind, dict[str, Any]]:
    if (folder / MANIFEST).exists():
        manifest = Manifest.read(folder)
        if manifest.format != "parquet":
            return _CHUNKS, {}
        return _PARQUET, {} if manifest.length_fn is None else {"length_column": LENGTH_COLUMN}
    if any(path.name.lower().endswith(PARQUET_SUFFIX) for path in visible_files(folder)):
        return _PARQUET, {}
    if (folder / INDEX).exists():
        return _MDS, {}
    raise ValueError(
        f"paths must name files of tokens, data sets of Megatron, or folders with {MANIFEST} of write_chunks, {INDEX} "
        f"of MDS shards or Parquet files, got {folder}"
    )
