"""The base class of `LengthBatchSampler` and `LengthBatchStream`: iterators, and where they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from torch import distributed
from torch.random import fork_rng

from ...utils.checks import check_bool, check_choice, check_int, check_rank
from ...utils.ranks import has_process_group
from ..batch_planning.planner import BatchPlanner
from .rank_batches import REMAINDERS, RankBatches
from .readers import Reader
from .state import Counts, Position, pack_state, unpack_state
from .windows import WindowMaker


class BatchingProgress(NamedTuple):
    """What was served to all ranks together since the beginning of training."""

    items: int
    tokens: int  #: without padding
    batches: int
    epochs: float  #: complete epochs, plus the served share of the current one if its size is known


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
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(planner, BatchPlanner):
            raise TypeError(f"planner must be a BatchPlanner, got {type(planner).__name__}")
        window = None if window is None else check_int("window", window, minimum=1)
        check_choice("remainder", remainder, REMAINDERS)
        check_bool("infinite", infinite)
        self.planner = planner
        self.rank, self.world_size = _rank_of(rank, world_size)
        self._rank_is_default = rank is None
        self._remainder = remainder
        self._infinite = infinite
        self._configuration = {
            **planner.configuration(),
            "window": window,
            "seed": seed,
            "remainder": remainder,
            **(settings or {}),
        }
        if planner.scheduler is not None and planner.scheduler.unit == "step":
            self._configuration["world_size"] = self.world_size
        self._reader = reader
        self._maker = WindowMaker(reader, planner, window, seed, self.world_size)
        self._followed: deque[Position] | None = None  # of the latest `follow`; None: a state was loaded since
        self._recorded: deque[Position] | None = None  # takes the positions of iterators that are created now
        self.move_to(self._maker.epoch_start(0, Counts()))

    def __iter__(self) -> BatchIterator:
        if self._rank_is_default and _rank_of(None, None)[1] > self.world_size:
            raise ValueError(
                f"rank and world_size must be those of torch.distributed, got {self.rank} and {self.world_size}, from "
                f"before it was initialized: make the {type(self).__name__} afterwards"
            )
        return BatchIterator(self, self._recorded)

    @property
    def batch_size(self) -> NoReturn:
        """Raises an error. Accelerate and Lightning read this attribute before they shard a batch sampler."""
        self._raise_no("batch_size")

    @property
    def sampler(self) -> NoReturn:
        """Raises an error. Accelerate reads this attribute before it shards or dispatches batches."""
        self._raise_no("sampler")

    def _raise_no(self, name: str) -> NoReturn:
        if self.world_size == 1:
            raise AttributeError(f"a {type(self).__name__} has no {name}")
        raise ValueError(
            f"a {type(self).__name__} of {self.world_size} ranks must not be sharded again: pass "
            "ResumableLoader(loader) to the trainer, and no DataLoader to accelerator.prepare"
        )

    @property
    def position(self) -> Position:
        """The position after the last served batch."""
        return self._current.position

    @property
    def progress(self) -> BatchingProgress:
        position, num_items = self.position, self._reader.num_items
        share = (position.served.items - position.epoch_start.items) / num_items if num_items else 0
        return BatchingProgress(*position.served, epochs=position.epoch + share)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last served batch: JSON-able, without the contents of items.

        The state is the same on every rank. Another number of ranks may load it, unless a schedule counts their steps.
        """
        return self.state_at(self.position)

    def previous_state_dict(self) -> dict[str, Any]:
        return self.state_at(self._previous)

    def state_at(self, position: Position) -> dict[str, Any]:
        return pack_state(position, self._configuration)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state. The next batch plans the open window again, and nothing before that window.

        Raises:
            TypeError: `state_dict` is not a mapping.
            ValueError: entries are missing or unknown, or a setting is different here. Nothing was changed.
        """
        position = unpack_state(state_dict, self._configuration)
        for _, cursor in position.served_up_to:
            self._reader.check(cursor)
        self._reader.forget()
        self.move_to(position)
        self._followed = None

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Trainers call this before each epoch."""

    def end_pass(self) -> None:
        """Go to where the next iterator starts."""
        self.move_to(self._begin().position)

    def skip_ended_epoch(self) -> None:
        """Go to the next epoch if no batch of this one is left."""
        if not self._current.has_step():
            self.move_to(self._current.next_epoch())

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

    def _rank_batches(self, position: Position) -> RankBatches:
        return RankBatches(
            self._maker,
            position,
            rank=self.rank,
            world_size=self.world_size,
            remainder=self._remainder,
            infinite=self._infinite,
        )

    def _begin(self) -> RankBatches:
        """The batches of a new iterator."""
        return self._current if self._start_is_set else self._next_pass()

    @abstractmethod
    def _next_pass(self) -> RankBatches:
        """The batches of a new iterator after one that has served a part of the epoch, or all of it."""


class BatchIterator(Iterator[list[Any]]):
    """Iterates over the rest of the epoch. It starts with its first batch, or once its state is taken.

    Args:
        recorded: takes the position after each batch, and that after the end. Then the iterator starts at once, and
            does not move `batches`.
    """

    def __init__(self, batches: PlannedBatches, recorded: deque[Position] | None) -> None:
        self._batches = batches
        self._recorded = recorded
        self._rank_batches: RankBatches | None = None
        self._ended = False
        if recorded is not None:
            self._start()

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> list[Any]:
        if self._ended:
            raise StopIteration
        rank_batches, batches = self._start(), self._batches
        if self._recorded is None:
            batches._current = rank_batches
        batch = rank_batches.step()
        self._ended = batch is None
        if self._recorded is not None:
            self._recorded.append(rank_batches.position)
        elif self._ended:
            batches.move_to(rank_batches.position)
        else:
            batches._start_is_set = False
        if batch is None:
            raise StopIteration
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The state of the batches after this iterator's last batch."""
        return self._batches.state_at(self._start().position)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._batches.load_state_dict(state_dict)
        self._rank_batches = None
        self._start()

    def _start(self) -> RankBatches:
        if self._rank_batches is None:
            self._rank_batches = self._batches._begin()
            if self._recorded is not None:
                self._batches.move_to(self._rank_batches.position)  # makes another RankBatches
        return self._rank_batches


def checked_seed(shuffle: bool, seed: int) -> int | None:
    """The seed of the order; None without shuffling."""
    check_bool("shuffle", shuffle)
    seed = check_int("seed", seed, minimum=0)
    return seed if shuffle else None


def _rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size must be given together, got {rank} and {world_size}")
    if rank is None or world_size is None:
        if not has_process_group():
            return 0, 1
        return distributed.get_rank(), distributed.get_world_size()
    check_rank(rank, world_size)
    return int(rank), int(world_size)  # NumPy's ints are not JSON-able
