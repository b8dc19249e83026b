"""A source over flat arrays of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...utils.checks import check_int, check_iterable
from ..files.data_file import DataFile, as_token_dtype
from ..files.document_ends import Separator, found_boundaries, given_boundaries
from ..files.documents import TokenFile
from ..files.remote import PathLike, check_location, is_path
from ..files.token_arrays import TokenArray, find_array
from .document_source import DocumentSource, check_locations


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
        TypeError: `paths` is neither a path nor a list of paths, or a setting has the wrong type.
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
        is_list = not is_path(paths)
        files = [DataFile(path) for path in check_locations("paths", paths, "a file or files of tokens")]
        separator = _separator(end_token, start_token, document_ends)
        dtype = None if dtype is None else as_token_dtype("dtype", dtype)
        folder = None if index_folder is None else check_location("index_folder", index_folder)
        super().__init__(buffer_size=buffer_size, **order)
        arrays = [find_array(file, dtype) for file in files]
        if separator is None:
            ends = _ends_of_files(document_ends, arrays, is_list)
            boundaries = [given_boundaries(array, each) for array, each in zip(arrays, ends, strict=True)]
        else:
            for array in arrays:
                _check_fits(separator, array.dtype)
            boundaries = [found_boundaries(array, separator, folder) for array in arrays]
        self._set_files(
            [
                TokenFile(array.file, array.dtype, array.first_byte, each)
                for array, each in zip(arrays, boundaries, strict=True)
            ]
        )


def _separator(end_token: int | None, start_token: int | None, document_ends: Any) -> Separator | None:
    given = [name for name, value in _named(end_token, start_token, document_ends).items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"end_token or start_token or document_ends must be given, one of them, got {' and '.join(given) or 'none'}"
        )
    if document_ends is not None:
        return None
    token = end_token if start_token is None else start_token
    return Separator(check_int(given[0], token, minimum=0), at_end=start_token is None)


def _named(end_token: Any, start_token: Any, document_ends: Any) -> dict[str, Any]:
    return {"end_token": end_token, "start_token": start_token, "document_ends": document_ends}


def _check_fits(separator: Separator, dtype: np.dtype[Any]) -> None:
    largest = np.iinfo(dtype).max
    if separator.token > largest:
        raise ValueError(f"{separator.name} must be at most {largest}, the largest {dtype}, got {separator.token}")


def _ends_of_files(document_ends: Any, arrays: Sequence[TokenArray], is_list: bool) -> list[Any]:
    if not is_list:
        return [document_ends]
    wanted = f"a list with the ends of each of {len(arrays)} files"
    check_iterable("document_ends", document_ends, wanted)
    ends = list(document_ends)
    if len(ends) != len(arrays):
        raise ValueError(f"document_ends must be {wanted}, got {len(ends)}")
    return ends
