"""A source over indexed data sets of Megatron."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..files.megatron import open_megatron, prefix_of
from ..files.remote import PathLike, check_named_once
from .base import check_locations
from .document_source import DocumentSource


class MegatronSource(DocumentSource):
    """The documents of Megatron's indexed data sets, pairs of a .bin and an .idx file. Megatron is not needed.

    Items are arrays of tokens, (tokens,) of the file's dtype. The sequences of a document are joined. Order, restoring
    and ranks are as in `TokenSource`.

    Args:
        prefixes: a path without .bin and .idx, or paths, in order, or URLs of fsspec, which are copied to this machine
            first. The path of the .bin or of the .idx file is accepted too, but not both.
        buffer_size: number of documents that are in memory together and mixed.
        order: the options of `Order`.

    Raises:
        ValueError: a data set is named twice, or a setting is out of range.
        ChunkError: A file is missing, damaged, truncated or of another format. Tokens are checked for number only.
    """

    def __init__(
        self,
        prefixes: PathLike | Iterable[PathLike],
        *,
        buffer_size: int = 10_000,
        **order: Any,
    ) -> None:
        super().__init__(buffer_size=buffer_size, **order)
        paths = check_locations("prefixes", prefixes, "the path of a data set without .bin and .idx, or a list of them")
        data_sets = [prefix_of(path) for path in paths]
        check_named_once("prefixes", data_sets, "data set (.bin and .idx)")
        self._set_files([open_megatron(path) for path in data_sets])
