"""A source over a stream that saves its own state, such as Hugging Face's IterableDataset."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ...utils.checks import check_int
from .base import BlockSource


class StreamSource(BlockSource):
    """The items of a Hugging Face IterableDataset, or of any iterable with `state_dict` and `load_state_dict`.

    The state holds the dataset's own state from before the open buffer. Restoring reads that buffer again. A dataset
    with a shuffle buffer is rejected, because its state does not include the buffer: set `shuffle` here instead, or use
    `dataset.shuffle(buffer_size=1)`, which shuffles only the files.

    Args:
        dataset: the dataset. An IterableDataset starts at its first item, whatever was read of it before. Another
            dataset must not have been iterated. `set_epoch` is called if the dataset has it, so that its files come in
            another order in each epoch.
        buffer_size: number of items in a buffer. One buffer is in memory. Only its items are shuffled.
        order: the options of `Order`. With `rank` and `world_size`, this process reads all items and keeps its own:
            `datasets.distributed.split_dataset_by_node` reads less of a dataset of many files.

    Attributes:
        world_size: number of processes that share the items, with those of `split_dataset_by_node`.

    Raises:
        TypeError: `dataset` has no state.
        ValueError: `dataset` has a shuffle buffer.
    """

    def __init__(self, dataset: Any, *, buffer_size: int = 10_000, **order: Any) -> None:
        super().__init__(**order)
        self.buffer_size = self._settings["buffer_size"] = check_int("buffer_size", buffer_size, minimum=1)
        if _has_shuffle_buffer(getattr(dataset, "_ex_iterable", None)):
            raise ValueError(
                "dataset must not have a shuffle buffer, which its state leaves out: set shuffle=True here"
            )
        if not hasattr(dataset, "load_state_dict"):
            raise TypeError(f"dataset must have state_dict and load_state_dict, got a {type(dataset).__name__}")
        self._dataset = dataset
        # An IterableDataset without a state starts at its first item. Its own state is that of what was read before.
        is_hugging_face = hasattr(dataset, "_starting_state_dict")
        self._first_state = None if is_hugging_face else copy.deepcopy(dataset.state_dict())
        self._state_before_block: Any = None  # None: the first state
        self.world_size *= getattr(getattr(dataset, "_distributed", None), "world_size", 1)

    def _blocks(self) -> Iterator[list[Any]]:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self.epoch)
        self._dataset.load_state_dict(self._first_state if self._block == 0 else self._state_before_block)
        stream = iter(self._dataset)
        while items := list(islice(stream, self.buffer_size)):
            after = copy.deepcopy(self._dataset.state_dict())
            number = self._block * self.buffer_size  # of the first item in the stream
            first = (self.order.rank - number) % self.order.world_size
            yield self._shuffled(items[first :: self.order.world_size])
            self._state_before_block = after

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "dataset": copy.deepcopy(self._state_before_block) if self._block else None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._state_before_block = copy.deepcopy(state_dict["dataset"])


def _has_shuffle_buffer(examples: Any) -> bool:
    """Search the chain of the private classes of `datasets`, which does not say it elsewhere."""
    if type(examples).__name__ == "BufferShuffledExamplesIterable" and examples.buffer_size > 1:
        return True
    inner = [getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or [])]
    return any(_has_shuffle_buffer(each) for each in inner if each is not None)
