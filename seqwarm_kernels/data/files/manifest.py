"""What a folder of chunks holds, in a small file beside them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...utils.files import write_atomically
from .compression import COMPRESSIONS
from .reader import FORMATS, ChunkError

MANIFEST = "manifest.json"
LENGTHS_SUFFIX = ".lengths.npy"


@dataclass(frozen=True)
class Chunk:
    file: str
    items: int
    bytes: int  #: of the file, as it lies there


@dataclass(frozen=True)
class Manifest:
    """Written twice: before the first chunk without any, and when all are there."""

    format: str
    compression: str
    items_per_chunk: int
    lengths_of: str | None  #: the name of what counted the lengths, None without lengths
    chunks: tuple[Chunk, ...] | None = None  #: None until all are written
    blank_items: int = 0  #: left out

    @property
    def items(self) -> int:
        return sum(chunk.items for chunk in self.chunks or ())

    def file_name(self, number: int) -> str:
        return f"chunk-{number:06d}{FORMATS[self.format]}{COMPRESSIONS[self.compression]}"

    def write(self, folder: Path) -> None:
        write_atomically(folder / MANIFEST, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @staticmethod
    def read(folder: Path) -> Manifest:
        """
        Raises:
            ValueError: there is none, or it is none.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            chunks = content.pop("chunks")
            return Manifest(**content, chunks=None if chunks is None else tuple(Chunk(**chunk) for chunk in chunks))
        except FileNotFoundError as error:
            raise ValueError(f"{folder} has no {MANIFEST}: it is no folder of write_chunks") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ChunkError(path, None, f"no manifest: {error}") from error

    def lengths(self, folder: Path) -> NDArray[np.int64]:
        """Of all items, in the order of the chunks.

        Raises:
            ValueError: there are none, or an array is not as long as its chunk.
        """
        if self.lengths_of is None:
            raise ValueError(f"{folder} holds no lengths: write_chunks takes length_fn")
        parts = [read_lengths(folder / chunk.file, chunk.items) for chunk in self.chunks or ()]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def read_lengths(chunk_path: Path, items: int) -> NDArray[np.int64]:
    path = chunk_path.with_name(lengths_file(chunk_path.name))
    try:
        lengths = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise ChunkError(path, None, f"cannot be read: {error}") from error
    if lengths.shape != (items,):
        raise ChunkError(path, None, f"it has the shape {lengths.shape}, its chunk {items} items")
    if lengths.dtype.kind not in "iu" or lengths.min(initial=0) < 0:
        raise ChunkError(path, None, f"it must hold ints of at least 0, got {lengths.dtype}")
    return lengths.astype(np.int64)


def lengths_file(chunk_file: str) -> str:
    return chunk_file.partition(".")[0] + LENGTHS_SUFFIX
