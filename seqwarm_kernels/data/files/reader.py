"""Files of items: text with one item a line, or JSON lines, compressed or not. Errors name the file and line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from .compression import COMPRESSIONS, DAMAGE, compression_of, decompress, open_uncompressed
from .remote import AnyPath

FORMATS = {"text": ".txt", "jsonl": ".jsonl"}


class ChunkError(ValueError):
    """A file is missing, damaged or has unexpected contents. The message begins with the file, and names the line."""

    def __init__(self, path: AnyPath, line: int | None, problem: str) -> None:
        where = str(path) if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {problem}")
        self.path, self.line, self.problem = path, line, problem

    def __reduce__(self) -> tuple[Any, ...]:  # worker processes send errors to their parent
        return type(self), (self.path, self.line, self.problem)


@contextmanager
def chunk_errors(path: AnyPath) -> Iterator[None]:
    """Errors of reading a file, or of decompressing it, become a `ChunkError`."""
    try:
        yield
    except DAMAGE as error:
        raise ChunkError(path, None, f"the compressed file is damaged: {error}") from error
    except OSError as error:
        is_named = error.filename is None or str(error.filename) == str(path)  # another one may be the local copy
        raise ChunkError(path, None, f"cannot be read: {reason_of(error) if is_named else error}") from error


def reason_of(error: Exception) -> str:
    """What went wrong, without the name of the file."""
    return getattr(error, "strerror", None) or str(error)


def format_of(path: AnyPath) -> str:
    """The key of `FORMATS` for the file name's suffix, before any .gz or .zst. Case is ignored."""
    name = path.name.lower().removesuffix(COMPRESSIONS[compression_of(path)])
    for found, suffix in FORMATS.items():
        if name.endswith(suffix):
            return found
    raise ValueError(f"paths must be a folder that exists, or end in .txt or .jsonl, also with .gz or .zst, got {path}")


def read_chunk(path: AnyPath, expected_items: int | None = None, expected_bytes: int | None = None) -> list[Any]:
    """Read all items of a file: strings, or decoded JSON values. Blank lines and a byte-order mark are skipped.

    Only "\\n" ends a line, so a line that ends with "\\r\\n" keeps its "\\r".

    Args:
        path: a file whose name ends as `format_of` requires.
        expected_items: number of items according to the manifest.
        expected_bytes: size of the file according to the manifest, or when it was first seen.

    Raises:
        ChunkError: The file is missing, damaged, truncated, without items, or differs from what is expected.
    """
    is_json = format_of(path) == "jsonl"
    with chunk_errors(path):
        content = path.read_bytes()
        lines = _lines_of(path, decompress(content, compression_of(path)))
    items = _decoded(path, lines) if is_json else list(filter(str.strip, lines))
    if expected_items is not None and len(items) != expected_items:
        raise ChunkError(path, None, f"the file has {len(items)} items, its manifest says {expected_items}")
    if expected_bytes is not None and len(content) != expected_bytes:
        raise ChunkError(path, None, f"the file has {len(content)} bytes, expected {expected_bytes}")
    if not items:
        raise ChunkError(path, None, "the file has only blank lines" if lines else "the file is empty")
    return items


def _lines_of(path: AnyPath, content: bytes) -> list[str]:
    try:
        lines = content.removeprefix(codecs.BOM_UTF8).decode().split("\n")
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        raise ChunkError(path, line, f"invalid UTF-8: {error.reason}") from error
    return lines if lines[-1] else lines[:-1]


def _decoded(path: AnyPath, lines: list[str]) -> list[Any]:
    items = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                items.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ChunkError(path, number, f"invalid JSON: {error}") from error
    return items


def iter_lines(path: AnyPath) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its "\\n"). The file may be binary, so it is read in blocks."""
    with chunk_errors(path), open_uncompressed(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ChunkError(path, number, f"invalid UTF-8: {error.reason}") from error
            yield number, text.removesuffix("\n")


def as_content(items: Iterable[Any], item_format: str) -> bytes:
    """The content of a file of items, for a key of `FORMATS`."""
    as_line = _text_line if item_format == "text" else partial(json.dumps, ensure_ascii=False, separators=(",", ":"))
    content = b"".join([as_line(item).encode() + b"\n" for item in items])
    # Readers skip one byte-order mark, so content that begins with one gets another.
    return codecs.BOM_UTF8 + content if content.startswith(codecs.BOM_UTF8) else content


def _text_line(item: Any) -> str:
    if not isinstance(item, str):
        raise TypeError(f"items must be strings for format 'text', got {item!r:.60}")
    if "\n" in item:
        raise ValueError(f"items must be one line each for format 'text', got {item!r:.60}")
    return item
