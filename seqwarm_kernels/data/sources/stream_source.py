"""Items of a stream that knows where it stands, as Hugging Face's IterableDataset does."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from ...utils.checks import check_int
from .base import BlockSource
from .permutation import shuffled

_PROTOCOL = ("__iter__", "state_dict", "load_state_dict")


class StreamSource(BlockSource):
    """The items of a Hugging Face IterableDataset, or of anything with its `state_dict` and `load_state_dict`.

    The dataset's own state is kept as it was before the open buffer; restoring reads that buffer again. A dataset's
    own shuffle buffer would be lost with it, and is refused: `shuffle` here is exact.

    Args:
        dataset: at its beginning. `set_epoch` is called where there is one, so that its files come in another order.
        seed: of the order inside the buffers, with the epoch.
        shuffle: the items of each buffer.
        buffer_size: items of a buffer, which lie in memory.
        infinite: one epoch after another for ever.
        rank, world_size: this process keeps every world_size-th item, and reads them all. With many files,
            `datasets.distributed.split_dataset_by_node` reads less: leave these two alone then.
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
        check_int("buffer_size", buffer_size, minimum=1)
        missing = [name for name in _PROTOCOL if not callable(getattr(dataset, name, None))]
        if missing:
            raise TypeError(
                f"dataset must have {', '.join(_PROTOCOL)}, as IterableDataset of datasets has since 2.20, "
                f"got {type(dataset).__name__} without {', '.join(missing)}"
            )
        if _has_shuffle_buffer(getattr(dataset, "_ex_iterable", None)):
            raise ValueError(
                "dataset must have no shuffle buffer, since its state loses what is in it: leave out its .shuffle() "
                "and set shuffle=True here, or use .shuffle(buffer_size=1), which shuffles files only"
            )
        self.buffer_size = buffer_size
        self._dataset = dataset
        self._beginning = self._before_block = copy.deepcopy(dataset.state_dict())

    def _blocks(self) -> Iterator[list[Any]]:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self.epoch)
        self._dataset.load_state_dict(self._beginning if self._block == 0 else self._before_block)
        stream = iter(self._dataset)
        while items := list(islice(stream, self.buffer_size)):
            after = copy.deepcopy(self._dataset.state_dict())
            yield self._own(items)
            self._before_block = after

    def _own(self, items: list[Any]) -> list[Any]:
        """Of each buffer those whose number in the stream is this rank's."""
        first = (self.rank - self._block * self.buffer_size) % self.world_size
        places = np.arange(first, len(items), self.world_size)
        if self.shuffle:
            places = shuffled(places, len(items), self.seed, self.epoch, self._block + 1)
        return [items[place] for place in places.tolist()]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "dataset": copy.deepcopy(self._before_block) if self._block else None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._before_block = copy.deepcopy(state_dict["dataset"])

    def _configuration(self) -> dict[str, Any]:
        return {"buffer_size": self.buffer_size}


def _has_shuffle_buffer(examples: Any) -> bool:
    """Looks into the chain of `datasets`' private classes; what is made otherwise has none that could be known."""
    if examples is None:
        return False
    if type(examples).__name__ == "BufferShuffledExamplesIterable" and examples.buffer_size > 1:
        return True
    inner = [getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or [])]
    return any(_has_shuffle_buffer(each) for each in inner)
