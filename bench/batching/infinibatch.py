"""Batches by the package infinibatch, if it is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from seqwarm_kernels.data.files.reader import read_chunk


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


def over_chunks(
    paths: Sequence[Path], length: Callable[[Any], int], max_tokens: int, window: int, buffer_size: int
) -> Any:
    """The endless pipeline of the blog post: shuffles chunks, items in buffers, and batches in windows."""
    from infinibatch.datasets import chunked_dataset_iterator

    items = chunked_dataset_iterator(
        [str(path) for path in paths],
        lambda path: iter(read_chunk(Path(path))),
        buffer_size=buffer_size,
        train=True,
        seed=0,
        shuffle=True,
    )
    return _bucketed(items, length, max_tokens, window)


def _bucketed(items: Any, length: Callable[[Any], int], max_tokens: int, window: int) -> Any:
    from infinibatch.iterators import BucketedReadaheadBatchIterator

    return BucketedReadaheadBatchIterator(
        items, read_ahead=window, key=length, batch_size=lambda longest: max_tokens // length(longest), seed=0
    )
