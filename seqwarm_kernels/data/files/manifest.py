"""The manifest of a folder of chunk files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from ...utils.checks import check_choice, check_int
from .compression import COMPRESSIONS
from .lengths import lengths_path, read_lengths
from .reader import FORMATS, ChunkError, reason_of
from .remote import AnyPath, write_file
from .transfers import read_ahead

MANIFEST = "manifest.json"
CHUNK_PREFIX = "chunk-"
_THREADS = 16

#: Formats of `write_chunks`, and the suffixes of their files.
CHUNK_FORMATS = {**FORMATS, "parquet": ".parquet"}


@dataclass(frozen=True)
class Chunk:
    file: str
    items: int
    bytes: int  #: size of the file on disk


@dataclass(frozen=True)
class Manifest:
    """Contents of a folder of chunk files.

    The manifest is written twice: without chunks just before the first chunk file, and again once all are written.
    """

    format: str
    compression: str
    items_per_chunk: int
    length_fn: str | None  #: name of the function that counted the lengths, None without lengths
    chunks: tuple[Chunk, ...] | None = None  #: None until all are written
    blank_items: int = 0  #: number of blank items that were left out

    @property
    def items(self) -> int:
        return sum(chunk.items for chunk in self.chunks or ())

    def file_name(self, number: int) -> str:
        suffix = "" if self.format == "parquet" else COMPRESSIONS[self.compression]  # Parquet compresses its pages
        return f"{CHUNK_PREFIX}{number:06d}{CHUNK_FORMATS[self.format]}{suffix}"

    def write(self, folder: AnyPath) -> None:
        write_file(folder / MANIFEST, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @staticmethod
    def read(folder: AnyPath) -> Manifest:
        """Read the manifest of `folder`.

        Raises:
            ValueError: The manifest is missing or invalid.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            chunks = content.pop("chunks")
            manifest = Manifest(**content, chunks=None if chunks is None else tuple(Chunk(**chunk) for chunk in chunks))
            manifest._check()
            return manifest
        except FileNotFoundError as error:
            raise ValueError(
                f"{folder} has no {MANIFEST}: it is not a folder of write_chunks. Pass its .txt or .jsonl files as a "
                "list, or write their items with write_chunks first"
            ) from error
        except OSError as error:
            raise ChunkError(path, None, f"cannot be read: {reason_of(error)}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ChunkError(path, None, f"invalid manifest: {error}") from error

    def _check(self) -> None:
        """Check every entry, of a file that may have been damaged."""
        check_choice("format", self.format, CHUNK_FORMATS)
        check_choice("compression", self.compression, COMPRESSIONS)
        check_int("items_per_chunk", self.items_per_chunk, minimum=1)
        check_int("blank_items", self.blank_items, minimum=0)
        if not isinstance(self.length_fn, (str, type(None))):
            raise TypeError(f"length_fn must be a string or null, got {self.length_fn!r}")
        if self.chunks is not None and not self.chunks:
            raise ValueError("chunks must be null or at least one chunk, got none")
        for number, chunk in enumerate(self.chunks or ()):
            if chunk.file != self.file_name(number):
                raise ValueError(f"file of chunk {number} must be {self.file_name(number)!r}, got {chunk.file!r}")
            check_int(f"items of {chunk.file}", chunk.items, minimum=1)
            check_int(f"bytes of {chunk.file}", chunk.bytes, minimum=1)

    def lengths(self, folder: AnyPath) -> NDArray[np.int64]:
        """Read the lengths of all items, in the order of the chunks.

        Returns:
            (items,) int64.

        Raises:
            ValueError: The folder has no lengths, holds Parquet files, or lengths are missing or invalid.
        """
        if self.format == "parquet":
            raise ValueError(f"{folder} holds Parquet files: their lengths are those of ParquetSource")
        if self.length_fn is None:
            raise ValueError(f"{folder} has no lengths: call write_chunks with length_fn")
        parts = [*read_ahead(lambda chunk: _lengths(folder, chunk), self.chunks or (), _THREADS)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _lengths(folder: AnyPath, chunk: Chunk) -> NDArray[np.int64]:
    return read_lengths(lengths_path(folder / chunk.file), chunk.items)
