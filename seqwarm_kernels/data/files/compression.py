"""Reading and writing uncompressed, gzip and zstd files."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from typing import Any, BinaryIO

from .remote import AnyPath, PathLike, check_location, read_whole

try:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
except ImportError:
    zstd = None  # type: ignore[assignment]

COMPRESSIONS = {"none": "", "gz": ".gz", "zst": ".zst"}

#: Errors of reading a compressed file that is damaged.
DAMAGE = (gzip.BadGzipFile, zlib.error, *(() if zstd is None else (zstd.ZstdError,)))

#: Errors of reading a file that is missing, truncated or damaged.
READ_ERRORS = (EOFError, OSError, *DAMAGE)


def compression_of(path: AnyPath) -> str:
    """The key of `COMPRESSIONS` for the file name's suffix. Case is ignored."""
    name = path.name.lower()
    return next((each for each, suffix in COMPRESSIONS.items() if suffix and name.endswith(suffix)), "none")


def read_uncompressed(path: PathLike) -> bytes:
    """The content of a file or of a URL of fsspec. Files that end in `.gz` or `.zst` are decompressed.

    Raises:
        TypeError: `path` is not a path.
        OSError: The file is missing, cannot be read, or is damaged.
        EOFError: The compressed file is truncated.
        ImportError: The file ends in `.zst`, and the package that reads it is missing.
    """
    path = check_location("path", path)
    try:
        return decompress(read_whole(path), compression_of(path))
    except DAMAGE as error:
        raise OSError(f"the compressed file is damaged: {error}") from error


def decompress(content: bytes, compression: str) -> bytes:
    """Decompress the content of a file. Raises an EOFError if it is truncated, or one of `DAMAGE`."""
    if compression == "gz" and content:
        return gzip.decompress(content)  # faster than in blocks
    with open_uncompressed(io.BytesIO(content), compression) as file:
        return bytes(file.read())


def open_uncompressed(file: BinaryIO, compression: str) -> Any:
    """Open a compressed file for reading from its beginning, or return the file. Closing may leave `file` open."""
    if compression == "gz":
        if not file.read(1):  # gzip reads a file of no bytes, which is a truncated one, as if it held nothing
            raise EOFError("the compressed file is empty")
        file.seek(0)
        return gzip.open(file)
    if compression == "zst":
        check_zstd()
        return zstd.open(file)
    return file


def check_zstd() -> None:
    """Raise an ImportError that says what to install, if zstd files cannot be read."""
    if zstd is None:
        raise ImportError(".zst files need Python 3.14 or the package backports.zstd: pip install backports.zstd")


def compress(content: bytes, compression: str) -> bytes:
    """Compress `content`, with a checksum. The same content always gives the same bytes."""
    if compression == "gz":
        return gzip.compress(content, compresslevel=6, mtime=0)
    if compression == "zst":
        check_zstd()
        parameter = zstd.CompressionParameter
        return zstd.compress(content, options={parameter.compression_level: 6, parameter.checksum_flag: 1})
    return content
