"""Flat arrays of tokens: plain ones, .npy files, and those with the header of llm.c."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .data_file import DataFile, fitting_dtype

DEFAULT_DTYPE = np.dtype(np.uint16)  #: of nanoGPT's files

_HEADER_INTS = 256
_INT32 = np.dtype("<i4")
#: The first number of llm.c's header -> version and dtype. modded-nanogpt writes the first kind.
_LLM_C: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
_NPY = b"\x93NUMPY"
_SAMPLE = 2**16  #: tokens that show whether the dtype fits
#: The first bytes of files that are not arrays of tokens.
_FOREIGN = {
    b"MMIDIDX": "an index of Megatron, which MegatronSource reads",
    b"PAR1": "a Parquet file, which ParquetSource reads",
    b"PK\x03\x04": "a zip file, such as .npz",
    b"\x1f\x8b": "a gzip file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
}


class TokenArray(NamedTuple):
    """Where the tokens of a file are."""

    file: DataFile
    dtype: np.dtype[Any]
    first_byte: int
    tokens: int  #: number of tokens


def find_array(file: DataFile, dtype: np.dtype[Any] | None) -> TokenArray:
    """Find the tokens of a file from its header. A file without a header holds nothing but tokens.

    Without `dtype`, it is that of the header, else `DEFAULT_DTYPE`.
    """
    start = file.read(np.dtype(np.uint8), 0, min(file.size, 8)).tobytes()
    for magic, kind in _FOREIGN.items():
        if start.startswith(magic):
            raise file.error_at(0, f"the file begins as {kind}")
    magic_number = int.from_bytes(start[:4], "little")
    if start.startswith(_NPY):
        array = _of_npy(file)
    elif magic_number in _LLM_C:
        array = _of_llm_c(file, *_LLM_C[magic_number])
    else:
        dtype = dtype or _check_default(file)
        array = TokenArray(file, dtype, 0, -(-file.size // dtype.itemsize))
    if dtype is not None and dtype != array.dtype:
        raise ValueError(f"dtype must be {array.dtype}, as the header of {file.path} says, got {dtype}")
    size = array.first_byte + array.tokens * array.dtype.itemsize
    file.check_size(size, f"{array.tokens:,} tokens of {array.dtype} end after {size:,} bytes")
    return array


def _check_default(file: DataFile) -> np.dtype[Any]:
    """Return the default dtype, unless the first tokens are those of a wider one."""
    sample = file.read(DEFAULT_DTYPE, 0, min(file.size // DEFAULT_DTYPE.itemsize, _SAMPLE) // 4 * 4)
    fitting = fitting_dtype([sample])
    if fitting != DEFAULT_DTYPE:
        raise ValueError(f"dtype must be {fitting} for {file.path}, or given as {DEFAULT_DTYPE} if it is right")
    return DEFAULT_DTYPE


def _of_llm_c(file: DataFile, version: int, dtype: np.dtype[Any]) -> TokenArray:
    header = file.read(_INT32, 0, _HEADER_INTS)
    if header[1] != version:
        raise file.error_at(4, f"the version of the header is {header[1]}, expected {version}")
    return TokenArray(file, dtype, header.nbytes, int(header[2]))


def _of_npy(file: DataFile) -> TokenArray:
    try:
        array = np.load(file.local, mmap_mode="r")  # reads the header only
    except Exception as error:  # NumPy raises errors of many types for a damaged header
        raise file.error_at(0, f"the .npy file is damaged: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise file.error_at(0, f"the array must hold ints in one dimension, got {array.dtype} of shape {array.shape}")
    return TokenArray(file, array.dtype, array.offset, len(array))
