"""The manifest of a folder of chunk files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ...utils.checks import check_int
from .compression import COMPRESSIONS
from .reader import FORMATS, ChunkError, chunk_errors
from .remote import AnyPath, write_file

MANIFEST = "manifest.json"

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
        return f"chunk-{number:06d}{CHUNK_FORMATS[self.format]}{suffix}"

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
            for number, chunk in enumerate(manifest.chunks or ()):
                if chunk.file != manifest.file_name(number):
                    raise ValueError(f"chunk {number} must be {manifest.file_name(number)!r}, got {chunk.file!r}")
                check_int("items", chunk.items, minimum=1)
                check_int("bytes", chunk.bytes, minimum=1)
            return manifest
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ChunkError(path, None, f"invalid manifest: {error}") from error

    def finished(self, folder: AnyPath) -> tuple[Chunk, ...]:
        """The chunks. Raises a ValueError if `write_chunks` has not finished the folder."""
        if self.chunks is None:
            raise ValueError(f"write_chunks has not finished {folder}: call it again with the same items")
        return self.chunks
