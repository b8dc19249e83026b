"""What batches of a data set and batches of a stream have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import distributed

from ...utils.checks import check_bool, check_int, check_rank
from ..planning.planner import BatchPlanner
from .rank_batches import REMAINDERS, Deal, Position
from .readers import Reader
from .schedule_progress import Counts
from .state import pack_state, unpack_state
from .windows import Start, WindowMaker


class Progress(NamedTuple):
    """What was handed out to all ranks together since the beginning."""

    items: int
    tokens: int  #: without padding
    batches: int
    epochs: float  #: those begun before this one, and the share of this one where its size is known


class PlannedBatches(ABC):
    """Batches that ranks and restarts agree on. `LengthBatchSampler` and `LengthBatchStream` are such.

    Attributes:
        planner: the rule.
        rank, world_size: which batches of a step come to this process.
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
        infinite: bool,
        settings: Mapping[str, Any],
    ) -> None:
        if not isinstance(planner, BatchPlanner):
            raise TypeError(f"planner must be a BatchPlanner, got {type(planner).__name__}")
        if window is not None:
            check_int("window", window, minimum=1)
        if seed is not None:
            check_int("seed", seed, minimum=0)
        if remainder not in REMAINDERS:
            raise ValueError(f"remainder must be one of {', '.join(REMAINDERS)}, got {remainder!r}")
        check_bool("infinite", infinite)
        self.planner = planner
        self.rank, self.world_size = _rank_of(rank, world_size)
        self._remainder = remainder
        self._infinite = infinite
        self._configuration = {
            **planner.configuration(),
            "window": window,
            "seed": seed,
            "remainder": remainder,
            **settings,
        }
        if planner.scheduler is not None and planner.scheduler.unit == "step":
            self._configuration["world_size"] = self.world_size
        self._reader = reader
        self._maker = WindowMaker(reader, planner, window, seed, self.world_size)
        self._at = self._deal(Position(self._maker.first(0, Counts())))
        self._record: deque[tuple[Position, Counts]] | None = None  # of iterators that are made now

    @property
    def progress(self) -> Progress:
        return self._progress(self._at.position.start, self._at.counts)

    def progress_of(self, state_dict: Mapping[str, Any]) -> Progress:
        """At a state of these batches."""
        position = self._unpacked(state_dict)
        return self._progress(position.start, Counts(**state_dict["progress"]))

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks stand behind the last batch that was handed out: JSON-able, no contents of items.

        It is the same on every rank, and another number of ranks may load it, unless a schedule counts their steps.
        """
        return self._state(self._at.position, self._at.counts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there. The open window is planned again, with the next batch, and nothing before it.

        Raises:
            TypeError, ValueError: entries are missing or unknown, or a setting is another here; nothing was changed.
        """
        position = self._unpacked(state_dict)
        self._reader.forget()
        self._at = self._deal(position)

    def _unpacked(self, state_dict: Mapping[str, Any]) -> Position:
        position = unpack_state(state_dict, self._configuration)
        for front in position.start.fronts:
            self._reader.check(front.place)
        return position

    def __iter__(self) -> BatchIterator:
        return BatchIterator(self)

    def _state(self, position: Position, counts: Counts) -> dict[str, Any]:
        return pack_state(position, counts, self._configuration)

    def _deal(self, position: Position) -> Deal:
        return Deal(
            self._maker,
            position,
            rank=self.rank,
            world_size=self.world_size,
            remainder=self._remainder,
            infinite=self._infinite,
        )

    def _take(self, deal: Deal) -> list[Any] | None:
        """The next batch, None at the end of the epoch."""
        self._at = deal
        batch = deal.step()
        if batch is None:
            self._at = self._deal(deal.position)
        return batch

    @abstractmethod
    def _begin(self) -> Deal:
        """What a new iterator takes its batches from."""

    @abstractmethod
    def _progress(self, start: Start, counts: Counts) -> Progress:
        """At those counts, in the epoch of the window that begins there."""


class BatchIterator(Iterator[list[Any]]):
    """Over what is left of the epoch. It begins with its first batch, or where its state is asked for."""

    def __init__(self, batches: PlannedBatches) -> None:
        self._batches = batches
        self._deal: Deal | None = None
        self._ended = False
        self._record = batches._record

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> list[Any]:
        batch = None if self._ended else self._batches._take(self._begun())
        if batch is None:
            self._ended = True
            raise StopIteration
        if self._record is not None:
            self._record.append((self._begun().position, self._begun().counts))
        return batch

    def state_dict(self) -> dict[str, Any]:
        """That of the batches, behind this iterator's last one."""
        return self._batches._state(self._begun().position, self._begun().counts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._batches.load_state_dict(state_dict)
        self._deal = self._batches._begin()

    def _begun(self) -> Deal:
        if self._deal is None:
            self._deal = self._batches._begin()
        return self._deal


def _rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size must be given together, got {rank} and {world_size}")
    if rank is None or world_size is None:
        if not (distributed.is_available() and distributed.is_initialized()):
            return 0, 1
        return distributed.get_rank(), distributed.get_world_size()
    check_rank(rank, world_size)
    return rank, world_size
