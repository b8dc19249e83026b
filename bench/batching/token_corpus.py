"""Generated corpora of tokens, and the conditions of a measurement."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from seqwarm_kernels.data.batch_planning.plan import IntArray

END_TOKEN = 50_256  #: GPT-2's end of text
MEAN_LENGTH, LONGEST = 400, 8_192  #: of a document

_TOKENS_PER_WRITE = 2**24


def document_lengths(tokens: int) -> IntArray:
    """Lengths that sum to `tokens`, log-normal as those of web pages, (documents,) int64."""
    random = np.random.default_rng(0)
    drawn = random.lognormal(np.log(MEAN_LENGTH) - 0.5, 1.0, tokens // (MEAN_LENGTH // 2) + 10)
    ends = np.cumsum(np.clip(drawn, 1, LONGEST).astype(np.int64))
    ends = np.append(ends[ends < tokens], tokens)
    return np.diff(ends, prepend=0)


def token_parts(lengths: IntArray) -> Iterator[NDArray[np.uint16]]:
    """Random tokens in parts, with `END_TOKEN` at the end of each document."""
    random, ends = np.random.default_rng(1), np.cumsum(lengths)
    total = int(ends[-1])
    with tqdm(total=total, desc="generate", unit=" tokens", unit_scale=True, disable=None) as bar:
        for first in range(0, total, _TOKENS_PER_WRITE):
            part = random.integers(0, END_TOKEN, min(_TOKENS_PER_WRITE, total - first), dtype=np.uint16)
            here = ends[np.searchsorted(ends, first, "right") : np.searchsorted(ends, first + len(part), "right")]
            part[here - 1 - first] = END_TOKEN
            yield part
            bar.update(len(part))


def write_flat(path: Path, lengths: IntArray) -> Path:
    """A file of nanoGPT's format."""
    with path.open("wb") as file:
        for part in token_parts(lengths):
            part.tofile(file)
        os.fsync(file.fileno())
    return path


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Ask the system to forget what it holds of the files in memory. They must be on the disk as a whole."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def conditions() -> str:
    """How the process is scheduled, and what else runs."""
    priority = os.sched_getparam(0).sched_priority  # 0 unless it is real-time
    scheduled = f"at real-time priority {priority} (chrt), " if priority else ""
    return f"{scheduled}{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.0f}"
