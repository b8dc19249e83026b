"""The manifest of a folder of chunk files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from .compression import COMPRESSIONS
from .lengths import lengths_path, read_lengths
from .reader import FORMATS, ChunkError, chunk_errors
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
        """Read the manifest of `folder`. A `ChunkError` says if it is missing or damaged."""
        path = folder / MANIFEST
        with chunk_errors(path):
            content = path.read_bytes()
        try:
            entries = json.loads(content)
            chunks = entries.pop("chunks")
            manifest = Manifest(**entries, chunks=None if chunks is None else tuple(Chunk(**chunk) for chunk in chunks))
            if manifest.chunks == ():
                raise ValueError("no chunks")
            for number, chunk in enumerate(manifest.chunks or ()):
                if chunk.file != manifest.file_name(number):
                    raise ValueError(f"chunk {number} must be {manifest.file_name(number)!r}, got {chunk.file!r}")
            return manifest
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ChunkError(path, None, f"invalid manifest: {error}") from error

    def lengths(self, folder: AnyPath) -> NDArray[np.int64]:
        """Read the lengths of all items, in the order of the chunks, (items,) int64."""
        if self.length_fn is None:
            raise ValueError(f"{folder} has no lengths: call write_chunks with length_fn")

        def read(chunk: Chunk) -> NDArray[np.int64]:
            return read_lengths(lengths_path(folder / chunk.file), chunk.items)

        return np.concatenate([np.empty(0, np.int64), *read_ahead(read, self.chunks or (), _THREADS)])
