"""Files as they are, of gzip, or of zstd."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

COMPRESSIONS = {"none": "", "gz": ".gz", "zst": ".zst"}

#: What reading may raise where a file is missing, cut short or damaged.
READ_ERRORS = (EOFError, OSError, zlib.error)

_BLOCK = 1 << 20


def compression_of(path: Path) -> str:
    """By the end of the name, in upper or lower case."""
    name = path.name.lower()
    return next((each for each, suffix in COMPRESSIONS.items() if suffix and name.endswith(suffix)), "none")


def read_uncompressed(path: Path) -> bytes:
    if compression_of(path) == "gz":
        return gzip.decompress(path.read_bytes())  # quicker than by blocks
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
    """zstandard's own readers end without an error where a file is cut short."""

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
        taken = self._rest[: len(buffer)]
        buffer[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)

    def close(self) -> None:
        self._file.close()
        super().close()


def zstandard() -> Any:
    """
    Raises:
        ImportError: the package is missing; says how to install it.
    """
    try:
        import zstandard as module
    except ImportError as error:
        raise ImportError(".zst files need the package zstandard: pip install zstandard") from error
    return module


def compress(content: bytes, compression: str) -> bytes:
    """The same bytes for the same content, whenever."""
    if compression == "gz":
        return gzip.compress(content, compresslevel=6, mtime=0)
    if compression == "zst":
        return zstandard().ZstdCompressor(level=6).compress(content)
    return content
