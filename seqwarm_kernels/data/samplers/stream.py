"""Batches of a stream of items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...utils.checks import check_int
from ..batch_planning.planner import BatchPlanner
from ..sources.base import Source
from ..sources.item_tokens import count_tokens
from .planned_batches import PlannedBatches
from .rank_batches import RankBatches
from .readers import SourceReader


class LengthBatchStream(PlannedBatches):
    """Yields lists of items of similar length from any `Source`, the same number of lists on every rank.

    Example::

        stream = LengthBatchStream(source, BatchPlanner(max_tokens=16384), length=lambda item: item[1])
        prepare = Prepare(PaddedCollator(), transform=tokenize)
        loader = ResumableLoader(DataLoader(ItemDataset(), batch_sampler=stream, collate_fn=prepare, num_workers=4))

    Reads and plans one window of items at a time. Every rank reads the same stream, plans the same batches and takes
    its own ones, so the source must not be split by rank. Costly work belongs after the planner, where each rank
    processes only its own batches: let the source know the lengths, and tokenize afterwards.

    Each `iter()` continues after the last batch, in a new epoch if the epoch of the source has ended. A DataLoader with
    workers fetches batches ahead, and leaves them out if an iteration is interrupted. `ResumableLoader` continues after
    the last batch that it yielded. A planner that may cut items yields a `Piece` for each item. Long items that a
    schedule yields later are not kept in memory: the source is read again.

    Runs in the main process, which gives the items of each batch to a worker of the DataLoader.

    Args:
        source: yields items. Do not use it elsewhere: this stream takes and loads its state.
        planner: divides the items of a window into batches.
        length: returns the number of tokens of an item. Default: the `len` of a mapping's "input_ids", of the first
            entry of a tuple such as (ids, labels), or else of the item. Items of text need a function.
        window: maximum number of items that are planned together. These items are in memory.
        shuffle: shuffle the batches of each window. The order of items is that of the source.
        seed: seed of that order.
        rank, world_size: default: those of torch.distributed if it is initialized, else 0 and 1.
        remainder: as in `LengthBatchSampler`, at the end of each epoch of the source.

    Raises:
        TypeError: items are text and have no `length`.
        ValueError: an argument has an invalid value, or an item is too long.
    """

    def __init__(
        self,
        source: Source[Any],
        planner: BatchPlanner,
        *,
        length: Callable[[Any], int] = count_tokens,
        window: int = 10_000,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        remainder: str = "drop",
    ) -> None:
        source_world_size = getattr(source, "world_size", 1)
        if source_world_size != 1:
            raise ValueError(
                f"source must not be split by rank, got world_size {source_world_size}: every rank reads all of it"
            )
        if planner.by_bucket and getattr(source, "infinite", False):
            raise ValueError(
                "source must end its epochs, got infinite=True with warmup='bucket', which serves long items last"
            )
        super().__init__(
            SourceReader(source, length),
            planner,
            window=window,
            seed=check_int("seed", seed, minimum=0) if shuffle else None,
            rank=rank,
            world_size=world_size,
            remainder=remainder,
        )

    def set_epoch(self, epoch: int) -> None:
        """Does nothing. The stream continues after its last batch, in the epoch of its source."""

    def _next_pass(self) -> RankBatches:
        current = self._current
        return current if current.has_step() else self._rank_batches(current.next_epoch())
