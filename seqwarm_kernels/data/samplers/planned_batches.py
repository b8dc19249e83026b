"""The base class of `LengthBatchSampler` and `LengthBatchStream`."""

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
from .rank_batches import REMAINDERS, Position, RankBatches
from .readers import Reader
from .schedule_progress import Counts
from .state import check_planned, pack_state, unpack_state
from .windows import WindowMaker


class BatchingProgress(NamedTuple):
    """What was served to all ranks together since the beginning of training."""

    items: int
    tokens: int  #: without padding
    batches: int
    epochs: float  #: complete epochs, plus the served share of the current one if its size is known


class Recorded(NamedTuple):
    """What `PlannedBatches.follow` keeps of a batch that was fetched, or of the end of the epoch."""

    position: Position  #: after the batch; at the end of the epoch, the start of the next one
    longest: int | None  #: tokens of the longest piece that was planned for the batch; None: the end of the epoch


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
        shuffle: bool,
        seed: int,
        rank: int | None,
        world_size: int | None,
        remainder: str,
        infinite: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(planner, BatchPlanner):
            raise TypeError(f"planner must be a BatchPlanner, got {type(planner).__name__}")
        window = None if window is None else check_int("window", window, minimum=1)
        check_bool("shuffle", shuffle)
        seed = check_int("seed", seed, minimum=0)
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
            "seed": seed if shuffle else None,
            "remainder": remainder,
            **(settings or {}),
        }
        if planner.scheduler is not None and planner.scheduler.unit == "step":
            self._configuration["world_size"] = self.world_size
        self._reader = reader
        self._maker = WindowMaker(reader, planner, window, seed if shuffle else None, self.world_size)
        self._current = self._start_epoch(0, Counts())
        self._start_is_set = True  # whether the next iterator starts at the current position
        self._previous = self.position
        self._recorded: deque[Recorded] | None = None  # of the iterators that are created now
        self._followed: deque[Recorded] | None = None  # of the latest `follow`; None: a state was loaded since

    def __iter__(self) -> BatchIterator:
        if self._rank_is_default and _rank_of(None, None)[1] > self.world_size:
            raise ValueError(
                f"rank and world_size must be those of torch.distributed, got {self.rank} and {self.world_size}, from "
                f"before it was initialized: make the {type(self).__name__} afterwards, or pass rank and world_size"
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
            f"a {type(self).__name__} of {self.world_size} ranks must not be sharded again: each rank already gets its "
            "own batches; pass ResumableLoader(loader) to the trainer, which takes it as it is, and no DataLoader to "
            "accelerator.prepare"
        )

    @property
    def position(self) -> Position:
        """The position after the last served batch."""
        return self._current.position

    @property
    def progress(self) -> BatchingProgress:
        return self.progress_at(self.position)

    def progress_at(self, position: Position) -> BatchingProgress:
        return BatchingProgress(*position.counts, epochs=self._epochs(position))

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
            TypeError: `state_dict` is not a mapping, or an entry has the wrong type.
            ValueError: entries are missing or unknown, or a setting is different here. Nothing was changed.
        """
        position = self._unpacked(state_dict)
        self._reader.forget()
        self.move_to(position)
        self._followed = None

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

    def follow(self, start: Callable[[], Iterator[Any]], check: Callable[[Any, int], Any]) -> Iterator[Any]:
        """Yield what a loader makes of these batches. Move along with the yielded batches, not with the fetched ones.

        Args:
            start: creates the loader's iterator over the rest of the epoch, and in it `iter()` of these batches.
            check: called with each batch and its `Recorded.longest`, before the batch is yielded.
        """
        # The seed of a pass that goes on was drawn before its state was taken, so this pass must not draw one.
        goes_on = self._followed is None and self.position.counts != self.position.start.epoch_start_counts
        self._recorded = recorded = deque[Recorded]()
        try:
            with fork_rng(devices=[], enabled=goes_on):
                batches = start()
        finally:
            self._recorded = None
        self._followed = recorded
        before = self.position
        for batch in batches:
            position, longest = recorded.popleft()
            assert longest is not None
            check(batch, longest)
            self.move_to(position)
            self._previous, before, self._start_is_set = before, position, False
            yield batch
            if self._followed is not recorded:
                raise RuntimeError(
                    "this iterator is invalid: the loader was iterated again or restored in the meantime"
                )
        if missing := sum(record.longest is not None for record in list(recorded)):
            raise RuntimeError(
                f"the data set or collate_fn raised StopIteration: {missing} batches of the epoch are missing"
            )
        if recorded:
            self.move_to(recorded[-1].position)

    def _unpacked(self, state_dict: Mapping[str, Any]) -> Position:
        position = unpack_state(state_dict, self._configuration)
        check_planned(position, self.planner)
        for entry in position.start.served_up_to:
            self._reader.check(entry.cursor)
        return position

    def _rank_batches(self, position: Position) -> RankBatches:
        return RankBatches(
            self._maker,
            position,
            rank=self.rank,
            world_size=self.world_size,
            remainder=self._remainder,
            infinite=self._infinite,
        )

    def _start_epoch(self, epoch: int, counts: Counts) -> RankBatches:
        return self._rank_batches(Position(self._maker.epoch_start(epoch, counts), counts))

    def _step(self, rank_batches: RankBatches) -> list[Any] | None:
        """The next batch, None at the end of the epoch."""
        self._current = rank_batches
        batch = rank_batches.step()
        self._start_is_set = False
        if batch is None:
            self.move_to(rank_batches.position)
        return batch

    def _begin_apart(self) -> RankBatches:
        """The batches of a new iterator whose steps do not move `position`. Another one starts at the same batch."""
        self.end_pass()
        return self._rank_batches(self.position)

    def _begin(self) -> RankBatches:
        """The batches of a new iterator."""
        return self._current if self._start_is_set else self._next_pass()

    @abstractmethod
    def _next_pass(self) -> RankBatches:
        """The batches of a new iterator after one that has served a part of the epoch, or all of it."""

    @abstractmethod
    def _epochs(self, position: Position) -> float:
        """`BatchingProgress.epochs` at `position`."""


class BatchIterator(Iterator[list[Any]]):
    """Iterates over the rest of the epoch. It starts with its first batch, or once its state is taken.

    Args:
        recorded: takes a record of each batch. Then the iterator starts at once, and does not move `batches`.
    """

    def __init__(self, batches: PlannedBatches, recorded: deque[Recorded] | None) -> None:
        self._batches = batches
        self._recorded = recorded
        self._rank_batches = None if recorded is None else self._begin()
        self._ended = False

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> list[Any]:
        batch = None if self._ended else self._step()
        if batch is None:
            self._ended = True
            raise StopIteration
        return batch

    @property
    def longest(self) -> int:
        """Tokens of the longest piece that was planned for this iterator's last batch."""
        return self._ensure_started().longest

    def state_dict(self) -> dict[str, Any]:
        """The state of the batches after this iterator's last batch."""
        return self._batches.state_at(self._ensure_started().position)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._batches.load_state_dict(state_dict)
        self._rank_batches = self._begin()

    def skip_ended_epoch(self) -> None:
        """Start the next epoch if no batch of this one is left."""
        rank_batches = self._ensure_started()
        if not rank_batches.has_step():
            self._rank_batches = self._batches._rank_batches(rank_batches.next_epoch())

    def _step(self) -> list[Any] | None:
        rank_batches = self._ensure_started()
        if self._recorded is None:
            return self._batches._step(rank_batches)
        batch = rank_batches.step()
        self._recorded.append(Recorded(rank_batches.position, None if batch is None else self.longest))
        return batch

    def _ensure_started(self) -> RankBatches:
        if self._rank_batches is None:
            self._rank_batches = self._begin()
        return self._rank_batches

    def _begin(self) -> RankBatches:
        return self._batches._begin() if self._recorded is None else self._batches._begin_apart()


def _rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size must be given together, got {rank} and {world_size}")
    if rank is None or world_size is None:
        if not has_process_group():
            return 0, 1
        return distributed.get_rank(), distributed.get_world_size()
    check_rank(rank, world_size)
    return int(rank), int(world_size)  # NumPy's ints are not JSON-able
