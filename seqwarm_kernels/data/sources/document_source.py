"""Sources of documents: files whose documents can be counted and measured without reading tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ...utils.checks import check_int
from ..batch_planning.plan import IntArray
from ..files.columns import as_columns
from ..files.data_file import DataFile, as_token_dtype
from ..files.document_ends import Separator, found_boundaries, given_boundaries
from ..files.documents import DocumentFile, TokenFile
from ..files.mds import open_mds
from ..files.megatron import open_megatron
from ..files.remote import PathLike, check_location, check_named_once, is_path
from ..files.token_arrays import find_array
from .base import PartSource, check_locations, fingerprint

#: Documents that stand next to each other in a file and are read at once. On disks this is faster than one by one.
_RUN = 64


class DocumentSource(PartSource):
    """The documents of files, in runs of neighbours. A subclass passes its files to `_set_files`."""

    def __init__(self, *, buffer_size: int, **order: Any) -> None:
        super().__init__(**order)
        self.buffer_size = check_int("buffer_size", buffer_size, minimum=1)

    def _set_files(self, files: Sequence[DocumentFile]) -> None:
        """The files of all ranks, in order."""
        self._files = files
        self._first_documents = [0, *accumulate(map(len, files))]  # of each file, and the number of all documents
        total = self._first_documents[-1]
        # Few documents are divided more finely, so that every rank has some.
        self._run = max(1, min(_RUN, self.buffer_size, total // self.world_size))
        self._set_parts(-(-total // self._run), self.buffer_size // self._run)
        self._settings = {"buffer_size": self.buffer_size, "files": fingerprint([file.facts for file in files])}

    def lengths(self) -> IntArray:
        """The number of tokens of each document of all ranks, in the order of the files, (documents,) int64.

        No tokens are read.
        """
        return np.concatenate([file.lengths() for file in self._files])

    def _read(self, numbers: IntArray) -> list[Any]:
        """The documents of runs, file after file. A run may begin in one file and end in another one."""
        firsts, parts = self._first_documents, defaultdict(list)
        for run in numbers.tolist():
            begin, end = run * self._run, min((run + 1) * self._run, firsts[-1])
            for number in range(bisect_right(firsts, begin) - 1, bisect_left(firsts, end)):
                first, after = firsts[number : number + 2]
                if first < after:  # a file may have no documents
                    parts[number].append((max(begin, first) - first, min(end, after) - first))
        return [item for number, found in parts.items() for item in self._files[number].read(found)]


class TokenSource(DocumentSource):
    """The documents of flat arrays of tokens: nanoGPT's and llm.c's .bin files, raw arrays of `numpy.memmap`, and .npy.

    Items are arrays of tokens, (tokens,) of the file's dtype. Documents are read in runs of 64 neighbours. The runs are
    shuffled over all files, and the documents inside each buffer. Restoring reads one buffer. Ranks read other runs.

    Exactly one of `end_token`, `start_token` and `document_ends` says where documents end. With a token, each file is
    read once to find the documents. Their lengths are kept in an .npz file, of 2 bytes a document where all have less
    than 65,536 tokens, and counted again if size or time of change of the tokens' file are different. Tokens before the
    first start token, or after the last end token, are a document.

    Args:
        paths: a file or files, in order, or URLs of fsspec, which are copied to this machine first. Files with the
            header of llm.c, which modded-nanogpt writes too, and .npy files are recognized. Other files are taken for
            tokens from their first to their last byte.
        end_token: the token at the end of each document, such as 50256 in nanoGPT's files of OpenWebText.
        start_token: the token at the start of each document, such as 50256 in files of llm.c and modded-nanogpt.
        document_ends: the number of tokens before the end of each document, non-decreasing: (documents,) ints, or the
            path or URL of a .npy file of them. The last one is the number of tokens in the file. For a list of `paths`,
            a list with one entry for each.
        dtype: NumPy dtype of a token. None: that of the header, else uint16.
        index_folder: folder or URL where the lengths are kept. None: beside each file or its local copy.
        buffer_size: number of documents that are in memory together and mixed.
        order: the options of `Order`.

    Raises:
        ValueError: a file is named twice, none or several of `end_token`, `start_token` and `document_ends` are given,
            or `document_ends` do not fit.
        ChunkError: A file is missing, damaged, truncated or of another format, or the token is not in it.
    """

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        *,
        end_token: int | None = None,
        start_token: int | None = None,
        document_ends: Any = None,
        dtype: Any = None,
        index_folder: PathLike | None = None,
        buffer_size: int = 10_000,
        **order: Any,
    ) -> None:
        super().__init__(buffer_size=buffer_size, **order)
        if sum(given is not None for given in (end_token, start_token, document_ends)) != 1:
            raise ValueError("one of end_token or start_token or document_ends must be given, and no other")
        dtype = as_token_dtype(dtype)
        arrays = [find_array(DataFile(path), dtype) for path in check_locations("paths", paths, "files of tokens")]
        folder = None if index_folder is None else check_location("index_folder", index_folder)
        if document_ends is None:
            name, token = ("start_token", start_token) if end_token is None else ("end_token", end_token)
            separator = Separator(name, int(token))  # type: ignore[arg-type]  # one is given
            boundaries = [found_boundaries(array, separator, folder) for array in arrays]
        else:
            ends = [document_ends] if is_path(paths) else list(document_ends)
            if len(ends) != len(arrays):
                raise ValueError(f"document_ends must have an entry for each of {len(arrays)} files, got {len(ends)}")
            boundaries = [given_boundaries(array, each) for array, each in zip(arrays, ends, strict=True)]
        self._set_files([*map(TokenFile, arrays, boundaries)])


class MegatronSource(DocumentSource):
    """The documents of Megatron's indexed data sets, pairs of a .bin and an .idx file. Megatron is not needed.

    Items are arrays of tokens, (tokens,) of the file's dtype. The sequences of a document are joined. Order, restoring
    and ranks are as in `TokenSource`.

    Args:
        prefixes: a path without .bin and .idx, or paths, in order, or URLs of fsspec, which are copied to this machine
            first. The path of the .bin or of the .idx file is accepted too, but not both.
        buffer_size, order: as for `TokenSource`.

    Raises:
        ValueError: a data set is named twice.
        ChunkError: A file is missing, damaged, truncated or of another format. Tokens are checked for number only.
    """

    def __init__(self, prefixes: PathLike | Iterable[PathLike], *, buffer_size: int = 10_000, **order: Any) -> None:
        super().__init__(buffer_size=buffer_size, **order)
        paths = check_locations("prefixes", prefixes, "paths of data sets without .bin and .idx")
        data_sets = [path.with_name(path.name.removesuffix(".bin").removesuffix(".idx")) for path in paths]
        check_named_once("prefixes", data_sets, "data set (.bin and .idx)")
        self._set_files([open_megatron(path) for path in data_sets])


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
        buffer_size, order: as for `TokenSource`.

    Raises:
        ImportError: mosaicml-streaming is not installed.
        ValueError: a folder is named twice, there is no such column, its encoding is another one, or `dtype` is missing
            or too narrow, which is seen when a shard is first read.
        ChunkError: An index or, when it is read, a shard is missing or damaged.
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
        paths = check_locations("folders", folders, "folders of MDS shards")
        dtype = as_token_dtype(dtype)
        shards = [shard for path in paths for shard in open_mds(path, as_columns(column), dtype)]
        check_named_once("folders", [shard.file.path for shard in shards], "shard")
        self._set_files(shards)
