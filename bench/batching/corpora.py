"""Real text for the benchmark of batching: items, lengths, and chunk files."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from seqwarm_kernels.data.batch_planning.plan import IntArray
from seqwarm_kernels.data.files.writer import write_chunks
from seqwarm_kernels.data.padding import count_tokens, read_text

TOKENIZERS = ("whitespace", "bpe", "bytes")


class Lengths(NamedTuple):
    tokens: IntArray
    counted: str  #: the unit of a length


@dataclass(eq=False)
class BenchCorpus:
    """A corpus that is read and counted on first use."""

    name: str  #: in records
    paths: list[Path]  #: files or folders
    unit: str  #: extent of an item, "line" or "paragraph"

    @cached_property
    def items(self) -> list[str]:
        return read_text(self.paths, self.unit)[0]

    @functools.cache  # noqa: B019  # a program has few
    def lengths(self, tokenizer: str) -> Lengths:
        return Lengths(*count_tokens(self.items, tokenizer))

    def write_chunks(self, folder: Path, most_bytes: int) -> None:
        """Writes one item per line. Items are truncated to `most_bytes`."""
        lines = (_truncated(" ".join(item.split("\n")), most_bytes) for item in self.items)
        write_chunks(lines, folder, length_fn=count_bytes)


def count_bytes(text: str) -> int:
    return len(text.encode())


def _truncated(text: str, most_bytes: int) -> str:
    return text if len(text) * 4 <= most_bytes else text.encode()[:most_bytes].decode(errors="ignore")


def wikitext() -> Path | None:
    """The validation part of WikiText-2 in the folder that SEQWARM_TEST_DATA names, or None."""
    data = os.environ.get("SEQWARM_TEST_DATA")
    path = Path(data, "wikitext-2", "valid.txt") if data else None
    return path if path is not None and path.is_file() else None


def corpora(large: Path | None) -> Iterator[BenchCorpus]:
    """The validation part of WikiText-2, if there is one, and a folder of the user."""
    path = wikitext()
    if path is not None:
        yield BenchCorpus("WikiText-2 validation", [path], "line")
    if large is not None:
        yield BenchCorpus(large.name, [large], "paragraph")


def many_lengths(lengths: IntArray, count: int, most: int) -> IntArray:
    """`count` lengths, drawn with replacement and limited to `most`."""
    drawn = np.random.default_rng(0).choice(lengths, count)
    return np.minimum(drawn, most)
