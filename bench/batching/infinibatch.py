"""Batches by the package infinibatch, if it is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from seqwarm_kernels.data.files.lengths import lengths_path, read_lengths
from seqwarm_kernels.data.files.reader import read_chunk

from .corpora import count_bytes


def installed() -> bool:
    return importlib.util.find_spec("infinibatch") is not None


def version() -> str:
    return importlib.metadata.version("infinibatch")


def over_lengths(lengths: list[int], max_tokens: int, window: int, shuffle: bool) -> Iterator[list[int]]:
    """Batches of indices: one epoch in order, or endless batches, shuffled."""
    from infinibatch.iterators import InfinitePermutationSourceIterator, NativeCheckpointableIterator

    indices = list(range(len(lengths)))
    source = InfinitePermutationSourceIterator(indices, seed=0) if shuffle else NativeCheckpointableIterator(indices)
    return _bucketed(source, lengths.__getitem__, max_tokens, window)


def over_chunks(folder: Path, max_tokens: int, window: int, *, stored_lengths: bool) -> Any:
    """The endless pipeline of the blog post: shuffles chunks, items in buffers of `window`, and batches in windows.

    Args:
        stored_lengths: the items are (text, length) with the lengths of `write_chunks`. False: they are texts.
    """
    from infinibatch.datasets import chunked_dataset_iterator

    def read(path: str) -> Iterator[Any]:
        items = read_chunk(Path(path))
        if not stored_lengths:
            return iter(items)
        return zip(items, read_lengths(lengths_path(Path(path)), len(items)).tolist(), strict=True)

    paths = sorted(map(str, folder.glob("*.txt.gz")))
    items = chunked_dataset_iterator(paths, read, buffer_size=window, train=True, seed=0, shuffle=True)
    return _bucketed(items, itemgetter(1) if stored_lengths else count_bytes, max_tokens, window)


def _bucketed(items: Any, length: Callable[[Any], int], max_tokens: int, window: int) -> Any:
    from infinibatch.iterators import BucketedReadaheadBatchIterator

    return BucketedReadaheadBatchIterator(
        items, read_ahead=window, key=length, batch_size=lambda longest: max_tokens // length(longest), seed=0
    )
