"""Megatron's indexed data sets: tokens in a .bin file, and the positions of the documents in an .idx file."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .data_file import DataFile
from .documents import TokenFile
from .remote import AnyPath
from .token_arrays import TokenArray

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = np.dtype([("magic", "V9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  #: of ints, by their codes


def open_megatron(prefix: AnyPath) -> TokenFile:
    """The documents of `prefix`.bin, from `prefix`.idx. A document is one or several sequences of the index."""
    tokens, index = (DataFile(prefix.with_name(prefix.name + suffix)) for suffix in (".bin", ".idx"))
    header = _read_header(index)
    num_sequences, num_indices = int(header["sequences"]), int(header["documents"])
    dtype = np.dtype(_DTYPES[int(header["dtype"])])
    first_length = _HEADER.itemsize
    first_pointer = first_length + 4 * num_sequences
    first_index = first_pointer + 8 * num_sequences
    end = first_index + 8 * num_indices
    if index.size != end + num_sequences:  # a multimodal data set has a byte for each sequence
        index.check_size(end, f"{num_sequences:,} sequences and {num_indices:,} document indices need {end:,} bytes")
    lengths = index.read(np.dtype("<i4"), first_length, num_sequences)
    _check(index, first_length, lengths >= 0, lengths, "a length is negative")
    bounds = np.append(0, np.cumsum(lengths, dtype=np.int64))
    pointers = index.read(np.dtype("<i8"), first_pointer, num_sequences)
    follows = pointers == bounds[:-1] * dtype.itemsize
    _check(index, first_pointer, follows, pointers, "a sequence does not begin where the one before it ends")
    indices = index.read(np.dtype("<i8"), first_index, num_indices)
    _check_indices(index, first_index, indices, num_sequences)
    size = int(bounds[-1]) * dtype.itemsize
    tokens.check_size(size, f"{index.path.name} has {bounds[-1]:,} tokens of {dtype} in {size:,} bytes")
    return TokenFile(TokenArray(tokens, dtype, 0, int(bounds[-1])), bounds[indices])


def _read_header(index: DataFile) -> Any:
    magic = index.read(np.dtype(np.uint8), 0, min(index.size, len(_MAGIC))).tobytes()
    if magic != _MAGIC:
        raise index.error_at(0, f"an index of Megatron begins with {_MAGIC!r}, got {magic!r}")
    header = index.read(_HEADER, 0, 1)[0]
    code = int(header["dtype"])
    if header["version"] != 1:
        raise index.error_at(9, f"the version is {header['version']}, expected 1")
    if code not in _DTYPES:
        raise index.error_at(17, f"the code of the dtype is {code}, ints have {list(_DTYPES)}")
    return header


def _check(index: DataFile, first_byte: int, valid: NDArray[np.bool_], values: NDArray[Any], problem: str) -> None:
    """Raise an error that names the byte of the first value that is not valid."""
    if not valid.all():
        number = int(np.argmin(valid))
        raise index.error_at(first_byte + number * values.itemsize, f"{problem}: number {number} is {values[number]}")


def _check_indices(index: DataFile, first_byte: int, indices: NDArray[np.int64], num_sequences: int) -> None:
    """Document indices begin at 0, never decrease, and end with the number of sequences."""
    if len(indices) < 2:
        raise index.error_at(first_byte, "the index has no documents")
    valid = (indices >= np.append(0, indices[:-1])) & (indices <= num_sequences)
    valid[0] &= indices[0] == 0
    valid[-1] &= indices[-1] == num_sequences
    _check(index, first_byte, valid, indices, f"document indices must rise from 0 to {num_sequences:,}")
