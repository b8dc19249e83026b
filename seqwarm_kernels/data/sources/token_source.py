"""A source over flat arrays of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..files.data_file import DataFile, as_token_dtype
from ..files.document_ends import Separator, found_boundaries, given_boundaries
from ..files.documents import TokenFile
from ..files.remote import PathLike, check_location, is_path
from ..files.token_arrays import find_array
from .base import check_locations
from .document_source import DocumentSource


class TokenSource(DocumentSource):
    """The documents of flat arrays of tokens: nanoGPT's and llm.c's .bin files, raw arrays of `numpy.memmap`, and .npy.

    Items are arrays of tokens, (tokens,) of the file's dtype. Documents are read in runs of 64 neighbours. The runs are
    shuffled over all files, and the documents inside each buffer. Restoring reads one buffer. The ranks read
    different runs.

    Exactly one of `end_token`, `start_token` and `document_ends` says where documents end. With a token, each file is
    read once to find the documents. Their places are kept in an .npz file of 8 bytes a document, and found again if
    size or time of change of the tokens' file are different. Tokens before the first start token, or after the last end
    token, are a document.

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
        index_folder: where the places of documents are kept, a folder or a URL. None: beside each file, or its local
            copy.
        buffer_size: number of documents that are in memory together and mixed.
        order: the options of `Order`.

    Raises:
        ValueError: a file is named twice, none or several of `end_token`, `start_token` and `document_ends` are given,
            `document_ends` do not fit, or a setting is out of range.
        ChunkError: A file is missing, damaged, truncated or of another format, or the token is not in it. A file that
            is damaged later raises it when it is read.
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
        separators = [
            Separator(int(token), at_end)
            for token, at_end in ((end_token, True), (start_token, False))
            if token is not None
        ]
        if len(separators) + (document_ends is not None) != 1:
            raise ValueError("one of end_token or start_token or document_ends must be given, and no other")
        super().__init__(buffer_size=buffer_size, **order)
        dtype = None if dtype is None else as_token_dtype("dtype", dtype)
        locations = check_locations("paths", paths, "a file or files of tokens")
        arrays = [find_array(DataFile(path), dtype) for path in locations]
        folder = None if index_folder is None else check_location("index_folder", index_folder)
        if separators:
            boundaries = [found_boundaries(array, separators[0], folder) for array in arrays]
        else:
            ends = [document_ends] if is_path(paths) else list(document_ends)
            if len(ends) != len(arrays):
                raise ValueError(f"document_ends must have an entry for each of {len(arrays)} files, got {len(ends)}")
            boundaries = [given_boundaries(array, each) for array, each in zip(arrays, ends, strict=True)]
        found = zip(arrays, boundaries, strict=True)
        self._set_files([TokenFile(array.file, array.dtype, array.first_byte, each) for array, each in found])
