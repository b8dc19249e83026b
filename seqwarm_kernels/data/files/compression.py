"""Reading and writing uncompressed, gzip and zstd files."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ...utils.checks import check_path

COMPRESSIONS = {"none": "", "gz": ".gz", "zst": ".zst"}

#: Errors of reading a file that is missing, truncated or damaged.
READ_ERRORS = (EOFError, OSError, zlib.error)

_BLOCK = 1 << 20


def compression_of(path: Path) -> str:
    """The key of `COMPRESSIONS` for the file name's suffix. Case is ignored."""
    name = path.name.lower()
    return next((each for each, suffix in COMPRESSIONS.items() if suffix and name.endswith(suffix)), "none")


def read_uncompressed(path: str | os.PathLike[str]) -> bytes:
    """The content of a file. Files that end in `.gz` or `.zst` are decompressed.

    Raises:
        TypeError: `path` is not a path.
        EOFError, OSError, zlib.error: The file is missing, truncated or damaged.
    """
    path = check_path("path", path)
    if compression_of(path) == "gz":
        return gzip.decompress(path.read_bytes())  # faster than in blocks
    with open_uncompressed(path) as file:
        return file.read()


def open_uncompressed(path: Path) -> io.BufferedIOBase:
    compression = compression_of(path)
    if compression == "gz":
        return gzip.open(path)
    if compression == "zst":
        package = zstandard()
        return io.BufferedReader(_ZstdReader(open(path, "rb"), package), _BLOCK)
    return open(path, "rb")


class _ZstdReader(io.RawIOBase):
    """Reads zstd and raises EOFError if the file is truncated. zstandard's own readers end without an error."""

    def __init__(self, file: IO[bytes], package: Any) -> None:
        self._file = file
        self._blocks = self._uncompressed(package)
        self._rest = memoryview(b"")

    def _uncompressed(self, package: Any) -> Iterator[bytes]:
        decompressor = None
        rest = b""
        while block := rest or self._file.read(_BLOCK):
            decompressor = decompressor or package.ZstdDecompressor().decompressobj()
            try:
                yield decompressor.decompress(block)
            except package.ZstdError as error:
                raise zlib.error(str(error)) from error
            rest = decompressor.unused_data
            if decompressor.eof:  # another frame may follow
                decompressor = None
        if decompressor is not None:
            raise EOFError

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        part = self._rest[: len(buffer)]
        buffer[: len(part)] = part
        self._rest = self._rest[len(part) :]
        return len(part)

    def close(self) -> None:
        self._file.close()
        super().close()


def zstandard() -> Any:
    """Import the package zstandard.

    Raises:
        ImportError: The package is missing. The message says how to install it.
    """
    try:
        import zstandard as module
    except ImportError as error:
        raise ImportError(".zst files need the package zstandard: pip install zstandard") from error
    return module


def compress(content: bytes, compression: str) -> bytes:
    """Compress `content`. The same content always gives the same bytes."""
    if compression == "gz":
        return gzip.compress(content, compresslevel=6, mtime=0)
    if compression == "zst":
        return zstandard().ZstdCompressor(level=6).compress(content)
    return content
