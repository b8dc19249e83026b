"""Batches of a data set whose lengths are known, for DataLoader's `batch_sampler`."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray
from torch.utils.data import Sampler

from ...utils.checks import check_bool, check_int
from ..planning.lengths import as_lengths
from ..planning.planner import BatchPlanner
from .planned_batches import PlannedBatches, Progress
from .rank_batches import Deal, Position
from .readers import IndexReader
from .schedule_progress import Counts
from .windows import Start


class LengthBatchSampler(PlannedBatches, Sampler[list[Any]]):
    """Lists of indices of items of similar length, the same number of lists for every rank.

        sampler = LengthBatchSampler(lengths, BatchPlanner(max_tokens=16384), window=10_000)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PaddedCollator(), num_workers=4)

    An epoch's items are shuffled, taken in windows, and planned; `world_size` batches make a step, one for each rank.
    Each `iter()` is an epoch: the next one if the last was handed out to its end, the same one anew if it was broken
    off, what is left of it after `load_state_dict`, which is nothing behind its last batch. `set_epoch` says otherwise.

    A planner that may cut items gives a `Piece` in place of an index: wrap the data set in `PieceDataset`.

    The state is that of batches handed out. A DataLoader with workers asks for batches ahead of training: take the
    state of `ResumableLoader`, or of torchdata's StatefulDataLoader.

    Args:
        lengths: (items,) ints, tokens of each item.
        planner: the rule.
        window: items that are planned together, at most; None: the whole epoch, which saves the most padding and takes
            a second or three for ten million items.
        shuffle: items, anew in each epoch, and the batches of a window. Without it items keep their order, and the
            batches of a window come longest first.
        seed: of both.
        infinite: one epoch after another in a single `iter()`, without a remainder between them.
        rank, world_size: by default those of torch.distributed, once it is initialised.
        remainder: what becomes of the last batches of an epoch that do not suffice for all ranks. "drop" them; "repeat"
            others of the last window; "empty", for evaluation: every item comes exactly once, and ranks that run out
            get [], which collators make a batch of no rows.

    Raises:
        TypeError, ValueError: an argument does not fit, or an item is too long; the message names it.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[Any],
        planner: BatchPlanner,
        *,
        window: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        infinite: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        remainder: str = "drop",
    ) -> None:
        check_bool("shuffle", shuffle)
        check_int("seed", seed, minimum=0)
        lengths = as_lengths(lengths)
        self._num_items = len(lengths)
        self._told = False  # where the next iterator begins
        self._planned: tuple[tuple[int, Counts], int] | None = None  # an epoch, and how many batches it has
        super().__init__(
            IndexReader(lengths, seed if shuffle else None, whole=window is None),
            planner,
            window=window,
            seed=seed if shuffle else None,
            rank=rank,
            world_size=world_size,
            remainder=remainder,
            infinite=infinite,
            settings={"infinite": infinite, "num_items": len(lengths), "lengths": zlib.crc32(lengths.tobytes())},
        )
        planner.check(lengths)

    @property
    def epoch(self) -> int:
        """That of the last batch, or the next one if the end of an epoch was reached."""
        return self._at.position.start.epoch

    def set_epoch(self, epoch: int) -> None:
        """The next `iter()` is this epoch, from its start, or what is left of it if a state of it was just loaded."""
        check_int("epoch", epoch, minimum=0)
        start = self._at.position.start
        if self._told and epoch == start.epoch:
            return
        self._told = True
        self._at = self._first(epoch, start.before if epoch == start.epoch else self._at.counts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._told = True

    def __len__(self) -> int:
        """Batches of an epoch that come to this rank. Plans the epoch, all of it; a schedule's pace is that of now."""
        if self._infinite:
            raise TypeError("an infinite LengthBatchSampler has no length")
        start = self._at.position.start
        if self._planned is None or self._planned[0] != (start.epoch, start.before):
            deal = self._first(start.epoch, start.before)
            self._planned = (start.epoch, start.before), sum(1 for _ in iter(deal.step, None))
        return self._planned[1]

    def _first(self, epoch: int, counts: Counts) -> Deal:
        return self._deal(Position(self._maker.first(epoch, counts)))

    def _settle(self) -> None:
        """Where the next iterator begins, made up now."""
        self._at, self._told = self._begin(), True

    def _begin(self) -> Deal:
        if self._told:
            self._told = False
            return self._at
        start, *_, served = self._at.position
        last = self._deal(self._at.position)
        if (served or start.counts != start.before) and not last.has_step():
            last.step()  # an epoch was handed out, but its end was not asked for
            return self._deal(last.position)
        return self._first(start.epoch, start.before)

    def _progress(self, start: Start, counts: Counts) -> Progress:
        done = counts.items - start.before.items
        return Progress(*counts, epochs=start.epoch + (done / self._num_items if self._num_items else 0))
