"""A source over shards in MosaicML's MDS format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..files.data_file import as_token_dtype
from ..files.mds import open_mds
from ..files.remote import PathLike
from .base import check_locations
from .document_source import DocumentSource


class MDSSource(DocumentSource):
    """A column of tokens or text in MosaicML's MDS shards. Needs the package mosaicml-streaming.

    Items are arrays of tokens, (tokens,), or texts. A compressed shard is decompressed beside the compressed file when
    it is first read, as mosaicml-streaming does, or in ~/.cache if that folder cannot be written. Order, restoring and
    ranks are as in `TokenSource`.

    Args:
        folders: a folder with an index.json and its shards, or folders, in order, or URLs of fsspec. A shard is copied
            to this machine when it is first read.
        column: the name of the column. Its encoding is bytes, ndarray with a dtype and one dimension, or str.
        dtype: NumPy dtype of the tokens in a column of bytes.
        buffer_size: number of documents that are in memory together and mixed.
        order: the options of `Order`.

    Raises:
        ImportError: mosaicml-streaming is not installed.
        TypeError: `folders` is neither a path nor a list of paths, or a setting has the wrong type.
        ValueError: a folder is named twice, there is no such column, its encoding is another one, `dtype` is missing or
            another one, or a setting is out of range.
        ChunkError: An index is missing or damaged. A shard that is missing or damaged raises it when it is read.
    """

    def __init__(
        self,
        folders: PathLike | Iterable[PathLike],
        *,
        column: str = "tokens",
        dtype: Any = None,
        buffer_size: int = 10_000,
        **order: Any,
    ) -> None:
        super().__init__(buffer_size=buffer_size, **order)
        paths = check_locations("folders", folders, "a folder of MDS shards, or a list of them")
        dtype = None if dtype is None else as_token_dtype("dtype", dtype)
        if not isinstance(column, str):
            raise TypeError(f"column must be a str, got {type(column).__name__}")
        self._set_files([file for path in paths for file in open_mds(path, column, dtype)])

    def lengths(self) -> Any:
        """The number of tokens of each document of all ranks, in the order of the files, (documents,) int64.

        For a column of text, the number of bytes in UTF-8. Tokens are read only if another column varies in size.
        """
        return super().lengths()
