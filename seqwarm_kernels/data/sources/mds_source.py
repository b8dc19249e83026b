"""A source over shards in MosaicML's MDS format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..files.columns import as_columns
from ..files.data_file import as_token_dtype
from ..files.mds import open_mds
from ..files.remote import PathLike, check_named_once
from .base import check_locations
from .document_source import DocumentSource


class MDSSource(DocumentSource):
    """Tokens or texts in MosaicML's MDS shards. Needs the package mosaicml-streaming.

    Items are arrays of tokens, (tokens,), or texts, or dicts of these from several columns. Their lengths are those of
    the first column, and those of a text are its bytes in UTF-8. A compressed shard is unpacked among the copies of
    files at URLs when it is first read. Order, restoring and ranks are as in `TokenSource`.

    Args:
        folders: a folder with an index.json, also a merged one, and its shards, or folders, in order, or URLs of
            fsspec. A shard is copied to this machine when it is first read.
        column: the name of a column, or a list of names. The encoding is bytes, ndarray with a dtype and one dimension,
            or str. Labels beside a column of tokens are as in `ParquetSource`.
        dtype: NumPy dtype of the tokens in columns of bytes.
        buffer_size: number of documents that are in memory together and mixed.
        order: the options of `Order`.

    Raises:
        ImportError: mosaicml-streaming is not installed.
        ValueError: a folder is named twice, there is no such column, its encoding is another one, or `dtype` is missing
            or too narrow, which is seen when a shard is first read.
        ChunkError: An index is missing or damaged. A shard that is missing or damaged raises it when it is read.
    """

    def __init__(
        self,
        folders: PathLike | Iterable[PathLike],
        *,
        column: str | Iterable[str] = "tokens",
        dtype: Any = None,
        buffer_size: int = 10_000,
        **order: Any,
    ) -> None:
        super().__init__(buffer_size=buffer_size, **order)
        paths = check_locations("folders", folders, "a folder of MDS shards, or a list of them")
        dtype = None if dtype is None else as_token_dtype("dtype", dtype)
        shards = [shard for path in paths for shard in open_mds(path, as_columns(column), dtype)]
        check_named_once("folders", [shard.file.path for shard in shards], "shard")
        self._set_files(shards)
