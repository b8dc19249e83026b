"""Read files of items: text with one item a line, or JSON lines, compressed or not. Errors name the file and line."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from .compression import COMPRESSIONS, DAMAGE, READ_ERRORS, compression_of, decompress, open_uncompressed
from .remote import AnyPath, open_whole, read_whole

FORMATS = {"text": ".txt", "jsonl": ".jsonl"}


class ChunkError(ValueError):
    """A file is missing, damaged or has unexpected contents. The message begins with the file and the line."""

    def __init__(self, path: AnyPath, line: int | None, problem: str) -> None:
        where = str(path) if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {problem}")
        self.path, self.line, self.problem = path, line, problem

    def __reduce__(self) -> tuple[Any, ...]:  # worker processes send errors to their parent
        return type(self), (self.path, self.line, self.problem)


def format_of(path: AnyPath) -> str:
    """The key of `FORMATS` for the file name's suffix, before any .gz or .zst. Case is ignored.

    Raises:
        ValueError: The file name has another suffix.
    """
    name = path.name.lower().removesuffix(COMPRESSIONS[compression_of(path)])
    found = next((each for each, suffix in FORMATS.items() if name.endswith(suffix)), None)
    if found is None:
        raise ValueError(
            f"files must end in {' or '.join(FORMATS.values())}, optionally followed by .gz or .zst, got {path}"
        )
    return found


def read_chunk(path: AnyPath, expected_items: int | None = None, expected_bytes: int | None = None) -> list[Any]:
    """Read all items of a file: strings, or decoded JSON values. Blank lines and a byte-order mark are skipped.

    Args:
        path: a file whose name ends as `format_of` requires.
        expected_items: number of items according to the manifest.
        expected_bytes: size of the file according to the manifest, or when it was first seen.

    Raises:
        ChunkError: The file is missing, unreadable, damaged, truncated, without items, or differs from what is
            expected.
        ValueError: The file name has another suffix.
    """
    is_json = format_of(path) == "jsonl"
    try:
        content = read_whole(path)
    except OSError as error:
        raise _unreadable(path, 1, error) from error
    try:
        lines = _all_lines(decompress(content, compression_of(path)))
        items: list[Any] = list(filter(str.strip, lines))
        if is_json:
            items = list(map(_from_json, items))
    except (*READ_ERRORS, ValueError, RecursionError):
        lines, items = _line_by_line(path, io.BytesIO(content), is_json)
    if expected_items is not None and len(items) != expected_items:
        verb = "ends after" if len(items) < expected_items else "has"
        problem = f"the file {verb} {len(items)} items, its manifest says {expected_items}"
        raise ChunkError(path, len(lines), problem)
    if expected_bytes is not None and len(content) != expected_bytes:
        raise ChunkError(path, len(lines), f"the file has {len(content)} bytes, expected {expected_bytes}")
    if not items:
        raise ChunkError(path, len(lines), "the file has only blank lines" if lines else "the file is empty")
    return items


def _all_lines(content: bytes) -> list[str]:
    """All lines at once, which is faster than line by line."""
    lines = content.removeprefix(codecs.BOM_UTF8).decode().split("\n")
    return lines if lines[-1] else lines[:-1]


def _line_by_line(path: AnyPath, content: BinaryIO, is_json: bool) -> tuple[list[str], list[Any]]:
    """Decode again to find the invalid line."""
    lines, items = [], []
    for number, text in _lines_of(path, content):
        lines.append(text)
        try:
            if text.strip():
                items.append(_from_json(text) if is_json else text)
        except ValueError as error:
            raise ChunkError(path, number, f"invalid JSON: {error}") from error
        except RecursionError as error:
            raise ChunkError(path, number, "the JSON is nested too deeply") from error
    return lines, items


_decode = json.JSONDecoder().raw_decode


def _from_json(text: str) -> Any:
    item, end = _decode(text) if text[0] not in " \t\r" else (None, -1)
    return item if end == len(text) else json.loads(text)  # accepts surrounding spaces, and raises


def iter_lines(path: AnyPath) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its "\\n"). Only "\\n" ends a line. The file is read in blocks.

    A byte-order mark at the beginning of the file is skipped.

    Raises:
        ChunkError: The file is missing, unreadable, damaged, truncated or invalid UTF-8.
    """
    try:
        with open_whole(path) as file:
            yield from _lines_of(path, file)
    except OSError as error:
        raise _unreadable(path, 1, error) from error


def _lines_of(path: AnyPath, content: BinaryIO) -> Iterator[tuple[int, str]]:
    """`iter_lines` of the opened file at `path`."""
    number = 0
    try:
        with open_uncompressed(content, compression_of(path)) as file:
            for number, line in enumerate(file, start=1):
                text = line.decode().removesuffix("\n")
                yield number, text.removeprefix("\ufeff") if number == 1 else text
    except UnicodeDecodeError as error:
        raise ChunkError(path, number, f"invalid UTF-8: {error.reason} at byte {error.start} of the line") from error
    except READ_ERRORS as error:
        raise _unreadable(path, number + 1, error) from error


def _unreadable(path: AnyPath, line: int, error: Exception) -> ChunkError:
    if isinstance(error, EOFError):
        return ChunkError(path, line, "the compressed file is truncated")
    if isinstance(error, DAMAGE):
        return ChunkError(path, line, f"the compressed file is damaged: {error}")
    return ChunkError(path, None, f"cannot be read: {reason_of(error)}")


def reason_of(error: Exception) -> str:
    """What went wrong, without the name of the file."""
    return getattr(error, "strerror", None) or str(error)


def as_line(item: Any, item_format: str, number: int) -> bytes:
    """Encode an item as a line.

    Args:
        item: the item.
        item_format: a key of `FORMATS`.
        number: the item's number, for error messages.

    Raises:
        TypeError: The item's type cannot be written.
        ValueError: The item has several lines, or cannot be encoded as UTF-8.
    """
    if item_format == "text":
        if not isinstance(item, str):
            raise TypeError(f"items must be strings for format 'text', got {type(item).__name__} as item {number}")
        if item.endswith("\n") and item.count("\n") == 1:
            raise ValueError(
                f"items must be one line each for format 'text', item {number} ends in a newline: strip it, as in "
                '(line.rstrip("\\n") for line in file)'
            )
        if "\n" in item:
            raise ValueError(
                f"items must be one line each for format 'text', item {number} has several: pass format='jsonl'"
            )
    try:
        text = item if item_format == "text" else json.dumps(item, ensure_ascii=False, separators=(",", ":"))
        return text.encode() + b"\n"
    except UnicodeEncodeError as error:
        raise ValueError(f"items must be text that UTF-8 can encode, item {number} is not: {error.reason}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"items must be JSON-serializable, item {number} is not: {error}") from error


def as_content(lines: list[bytes]) -> bytes:
    """The content of a file. Readers skip one byte-order mark, so content that begins with one gets another."""
    content = b"".join(lines)
    return codecs.BOM_UTF8 + content if content.startswith(codecs.BOM_UTF8) else content
