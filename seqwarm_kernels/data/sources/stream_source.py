"""A source over a stream that saves its own state, such as Hugging Face's IterableDataset."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NoReturn

import numpy as np

from ...utils.checks import check_int
from .base import BlockSource
from .permutation import ORDER, permutation

_PROTOCOL = ("__iter__", "state_dict", "load_state_dict")


class StreamSource(BlockSource):
    """The items of a Hugging Face IterableDataset, or of any iterable with `state_dict` and `load_state_dict`.

    The state holds the dataset's own state from before the open buffer. Restoring reads that buffer again. A dataset
    with a shuffle buffer is rejected, because its state does not include the buffer. `shuffle` of this class is exact.

    Args:
        dataset: the dataset. An IterableDataset starts at its first item, whatever was read of it before. Another
            dataset must not have been iterated. `set_epoch` is called if the dataset has it, so that its files come in
            another order in each epoch.
        seed: determines the order inside the buffers, together with the epoch.
        shuffle: shuffle the items of each buffer.
        buffer_size: number of items in a buffer. One buffer is in memory.
        infinite: repeat epochs forever.
        rank, world_size: this process reads all items and keeps every world_size-th one. Leave them and
            `datasets.distributed.split_dataset_by_node` out in a `LengthBatchStream`, whose ranks all read all items.
            Without one, that split of a dataset of many files reads less: keep these two at their defaults with it.

    Attributes:
        world_size: number of processes that share the items, with those of `split_dataset_by_node`.

    Raises:
        TypeError: `dataset` does not have the three methods, or a setting has the wrong type.
        ValueError: `dataset` has a shuffle buffer, or a setting is out of range.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int = 0,
        shuffle: bool = True,
        buffer_size: int = 10_000,
        infinite: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(seed=seed, shuffle=shuffle, infinite=infinite, rank=rank, world_size=world_size)
        buffer_size = check_int("buffer_size", buffer_size, minimum=1)
        missing = [name for name in _PROTOCOL if not callable(getattr(dataset, name, None))]
        if missing:
            raise TypeError(
                f"dataset must have {', '.join(_PROTOCOL)}, as IterableDataset of datasets has since 2.20, "
                f"got {type(dataset).__name__} without {', '.join(missing)}"
            )
        if _has_shuffle_buffer(getattr(dataset, "_ex_iterable", None)):
            raise ValueError(
                "dataset must not have a shuffle buffer, because its state does not include the buffer: leave out its "
                ".shuffle() and set shuffle=True here, or use .shuffle(buffer_size=1), which shuffles only the files"
            )
        self.buffer_size = buffer_size
        self._dataset = dataset
        # An IterableDataset without a state starts at the beginning. Its own state may be that of an earlier iteration.
        starts_anew = hasattr(dataset, "_starting_state_dict")
        self._initial_state = None if starts_anew else copy.deepcopy(dataset.state_dict())
        self._state_before_block = self._initial_state
        self._own_world_size = self.world_size  # the given one, as in the state
        self.world_size *= getattr(getattr(dataset, "_distributed", None), "world_size", 1)

    def lengths(self) -> NoReturn:
        """A stream does not know the lengths of its items before they are read.

        Raises:
            TypeError: always. The message says how to count them once.
        """
        raise TypeError(
            "a StreamSource does not know the lengths of its items: write them once with write_chunks and a length_fn, "
            "and read them with ChunkSource"
        )

    def _blocks(self) -> Iterator[list[Any]]:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self.epoch)
        self._dataset.load_state_dict(self._initial_state if self._block == 0 else self._state_before_block)
        stream = iter(self._dataset)
        while items := list(islice(stream, self.buffer_size)):
            after = copy.deepcopy(self._dataset.state_dict())
            yield self._items_of_rank(items)
            self._state_before_block = after

    def _items_of_rank(self, items: list[Any]) -> list[Any]:
        """The items of a buffer whose number in the stream, modulo the given `world_size`, is this rank."""
        first = (self.rank - self._block * self.buffer_size) % self._own_world_size
        indices = np.arange(first, len(items), self._own_world_size)
        if self.shuffle:
            indices = permutation(len(items), self.seed, self.epoch, self._block + 1)[indices]
        return [items[index] for index in indices.tolist()]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "dataset": copy.deepcopy(self._state_before_block) if self._block else None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._state_before_block = copy.deepcopy(state_dict["dataset"])

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().check_state_dict(state_dict)
        if (state_dict["dataset"] is None) != (state_dict["block"] == 0):
            raise ValueError(
                "dataset of state_dict must be the dataset's state, and None only in block 0, got "
                f"{state_dict['dataset']!r:.60} in block {state_dict['block']}"
            )

    def _configuration(self) -> dict[str, Any]:
        return {"order": ORDER, "buffer_size": self.buffer_size, "world_size": self._own_world_size}


def _has_shuffle_buffer(examples: Any) -> bool:
    """Search the chain of the private classes of `datasets`. Other datasets count as without a shuffle buffer."""
    if examples is None:
        return False
    if type(examples).__name__ == "BufferShuffledExamplesIterable" and examples.buffer_size > 1:
        return True
    inner = [getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or [])]
    return any(_has_shuffle_buffer(each) for each in inner)
