"""A DataLoader that can be resumed, with any number of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from ..batching.planned_batches import Progress
from ..batching.rank_batches import Position
from ..batching.sampler import LengthBatchSampler
from ..batching.schedule_progress import Counts


class ResumableLoader:
    """What a DataLoader over a `LengthBatchSampler` gives, with the state of what came out of it.

    Workers fetch ahead, so the sampler stands further than training does. This keeps, for each batch under way, where
    the sampler stood behind it. The state does not depend on the workers: any other number of them may load it.

    Args:
        loader: has a `LengthBatchSampler` for its `batch_sampler`, and gives batches in order.

    Raises:
        TypeError, ValueError: `loader` is no such.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        if not isinstance(loader, DataLoader):
            raise TypeError(f"loader must be a DataLoader, got {type(loader).__name__}")
        if not isinstance(loader.batch_sampler, LengthBatchSampler):
            raise ValueError(
                f"loader must have a LengthBatchSampler as batch_sampler, got {type(loader.batch_sampler).__name__}"
            )
        if not loader.in_order:
            raise ValueError("loader must have in_order=True: a state is that of the batches before one")
        self._loader = loader
        self._sampler = loader.batch_sampler
        self._last: tuple[Position, Counts] | None = None  # behind the last batch that came out, until the epoch ends
        self._any_came_out = False

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """An epoch, as the sampler's `iter()` says, or what is left of it after `load_state_dict`."""
        self._take_back()
        self._sampler._settle()
        self._last = self._sampler._at.position, self._sampler._at.counts
        self._any_came_out = False
        record: deque[tuple[Position, Counts]] = deque()
        self._sampler._record = record
        try:
            batches = iter(self._loader)
        finally:
            self._sampler._record = None
        for batch in batches:
            self._last, self._any_came_out = record.popleft(), True
            yield batch
        if record:
            raise RuntimeError(
                f"the data set or collate_fn raised StopIteration: {len(record)} batches of the epoch did not come out"
            )
        self._last = None

    def set_epoch(self, epoch: int) -> None:
        self._take_back()
        self._sampler.set_epoch(epoch)

    @property
    def progress(self) -> Progress:
        if self._last is None:
            return self._sampler.progress
        position, counts = self._last
        return self._sampler._progress(position.start, counts)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's, behind the last batch that came out."""
        return self._sampler.state_dict() if self._last is None else self._sampler._state(*self._last)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there with the next `iter()`. The sampler's own states will do as well."""
        self._sampler.load_state_dict(state_dict)
        self._last = None

    def _take_back(self) -> None:
        """Where an iteration was broken off, batches that were fetched ahead never came out."""
        if self._last is not None:
            self._sampler._at = self._sampler._deal(self._last[0])
            self._sampler._told = not self._any_came_out  # else the epoch was broken off
            self._last = None
