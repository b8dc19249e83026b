"""The base class of `LengthBatchSampler` and `LengthBatchStream`: iterators, and where they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

from torch import distributed
from torch.random import fork_rng

from ...utils.checks import check_choice, check_int, check_rank, check_same_configuration
from ...utils.ranks import has_process_group
from ..batch_planning.planner import BatchPlanner
from .rank_batches import REMAINDERS, RankBatches
from .readers import Reader
from .state import Counts, Position
from .windows import WindowMaker


class BatchingProgress(NamedTuple):
    """What was yielded to all ranks together since the beginning of training."""

    items: int
    tokens: int  #: without padding
    batches: int
    epochs: float  #: complete epochs, plus the yielded share of the current one if its size is known


class PlannedBatches(ABC):
    """Batches that are the same for every rank and after every restart.

    Loaders that fetch batches ahead of training use `follow`. Then `position` is that of the last yielded batch.

    Attributes:
        planner: the `BatchPlanner`.
        rank, world_size: decide which batch of each step this process gets.
    """

    def __init__(
        self,
        reader: Reader,
        planner: BatchPlanner,
        *,
        window: int | None,
        seed: int | None,
        rank: int | None,
        world_size: int | None,
        remainder: str,
        infinite: bool = False,
    ) -> None:
        window = None if window is None else check_int("window", window, minimum=1)
        check_choice("remainder", remainder, REMAINDERS)
        self.planner = planner
        self.rank, self.world_size = _rank_of(rank, world_size)
        self._rank_is_default = rank is None
        own = {"window": window, "seed": seed, "remainder": remainder, "infinite": infinite}
        if planner.scheduler is not None and planner.scheduler.unit == "step":
            own["world_size"] = self.world_size
        self._configuration = {**planner.configuration(), **own}
        self._reader = reader
        self._maker = WindowMaker(reader, planner, window, seed, self.world_size)
        self._rank_batches = partial(
            RankBatches,
            self._maker,
            rank=self.rank,
            world_size=self.world_size,
            remainder=remainder,
            infinite=infinite,
        )
        self._followed: deque[Position] | None = None  # of the latest `follow`; None: a state was loaded since
        self._recorded: deque[Position] | None = None  # takes the positions of the iterator that is created now
        self.move_to(self._maker.epoch_start(0, Counts()))

    def __iter__(self) -> Iterator[list[Any]]:
        if self._rank_is_default and _rank_of(None, None)[1] > self.world_size:
            raise ValueError(
                f"rank and world_size must be those of torch.distributed, got {self.rank} and {self.world_size}, from "
                f"before it was initialized: make the {type(self).__name__} afterwards"
            )
        if self._recorded is None:
            return self._pass()
        rank_batches = self._begin()
        self.move_to(rank_batches.position)  # with RankBatches of its own
        return _recorded_pass(rank_batches, self._recorded)

    def _pass(self) -> Iterator[list[Any]]:
        """The rest of an epoch. Starts with its first batch, and moves along."""
        rank_batches = self._begin()
        while True:
            self._current = rank_batches
            batch = rank_batches.step()
            if batch is None:
                self.move_to(rank_batches.position)
                return
            self._start_is_set = False
            yield batch

    @property
    def batch_size(self) -> NoReturn:
        """Raises an error, as `sampler`. Accelerate and Lightning read both before they shard a batch sampler."""
        name = type(self).__name__
        if self.world_size == 1:
            raise AttributeError(f"a {name} has no batch_size and no sampler")
        raise ValueError(
            f"a {name} of {self.world_size} ranks must not be sharded again: pass ResumableLoader(loader) to the "
            "trainer, and no DataLoader to accelerator.prepare"
        )

    sampler = batch_size

    @property
    def position(self) -> Position:
        """The position after the last yielded batch."""
        return self._current.position

    @property
    def progress(self) -> BatchingProgress:
        position, num_items = self.position, self._reader.num_items
        share = (position.yielded.items - position.epoch_start.items) / num_items if num_items else 0
        return BatchingProgress(*position.yielded, epochs=position.epoch + share)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last yielded batch: JSON-able, without the contents of items.

        The state is the same on every rank. Another number of ranks may load it, unless a schedule counts their steps.
        """
        return self._state_at(self.position)

    def previous_state_dict(self) -> dict[str, Any]:
        """The state before the last batch of `follow`."""
        return self._state_at(self._previous)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state. The next batch plans the open window again, and nothing before that window.

        Raises:
            ValueError: a setting is different here. Nothing was changed.
        """
        check_same_configuration(state_dict["configuration"], self._configuration)
        position = Position.of(state_dict)
        for _, cursor in position.yielded_up_to:
            self._reader.check(cursor)
        self.move_to(position)
        self._followed = None

    def _state_at(self, position: Position) -> dict[str, Any]:
        return {**position.plain(), "configuration": dict(self._configuration)}

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Trainers call this before each epoch."""

    def end_pass(self) -> None:
        """Go to where the next iterator starts."""
        self.move_to(self._begin().position)

    def move_to(self, position: Position) -> None:
        """Go to `position`, where the next iterator starts."""
        self._current, self._previous = self._rank_batches(position), position
        self._start_is_set = True

    def follow(self, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield what a loader makes of these batches. Move along with the yielded batches, not with the fetched ones.

        Args:
            start: creates the loader's iterator over the rest of the epoch, and in it `iter()` of these batches.
        """
        # The seed of a pass that goes on was drawn before its state was taken, so this pass must not draw one.
        goes_on = self._followed is None and not self.position.is_epoch_start
        self._recorded = recorded = deque[Position]()
        try:
            with fork_rng(devices=[], enabled=goes_on):
                batches = start()
        finally:
            self._recorded = None
        self._followed = recorded
        before = self.position
        for batch in batches:
            position = recorded.popleft()
            self.move_to(position)
            self._previous, before, self._start_is_set = before, position, False
            yield batch
            if self._followed is not recorded:
                raise RuntimeError(
                    "this iterator is invalid: the loader was iterated again or restored in the meantime"
                )
        # The record after that of the last batch is the start of the next epoch.
        if missing := sum(not position.is_epoch_start for position in list(recorded)):
            raise RuntimeError(f"the data set or collate_fn raised StopIteration: {missing} batches are missing")
        if recorded:
            self.move_to(recorded[-1])

    def _begin(self) -> RankBatches:
        """The batches of a new iterator."""
        return self._current if self._start_is_set else self._next_pass()

    @abstractmethod
    def _next_pass(self) -> RankBatches:
        """The batches of a new iterator after one that has yielded a part of the epoch, or all of it."""


def _recorded_pass(rank_batches: RankBatches, recorded: deque[Position]) -> Iterator[list[Any]]:
    """The rest of an epoch. Records the position after each batch, and that after the end."""
    while (batch := rank_batches.step()) is not None:
        recorded.append(rank_batches.position)
        yield batch
    recorded.append(rank_batches.position)


def _rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        return (distributed.get_rank(), distributed.get_world_size()) if has_process_group() else (0, 1)
    check_rank(rank, world_size)
    return int(rank), int(world_size)  # type: ignore[arg-type]  # NumPy's ints are not JSON-able
