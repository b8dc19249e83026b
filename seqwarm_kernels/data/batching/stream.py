"""Batches of a stream of items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ...utils.checks import check_bool, check_int
from ..planning.planner import BatchPlanner
from ..sources.base import Source
from .planned_batches import BatchIterator, PlannedBatches, Progress
from .rank_batches import Deal
from .readers import SourceReader
from .schedule_progress import Counts
from .windows import Start


class LengthBatchStream(PlannedBatches, IterableDataset[list[Any]]):
    """Lists of items of similar length, from any `Source`, the same number of lists for every rank.

    Reads a window of items, plans it, and hands it out. Every rank reads the same stream, plans the same batches of it
    and takes its own, so the source must not be split by rank. What is costly belongs behind the planner, where only a
    rank's own batches pass: let the source know lengths, and tokenise then.

    `iter()` goes on behind the last batch, in a new epoch if the source's ended. With a planner that may cut items,
    what comes is a `Piece` in place of an item. Long items that a schedule keeps for later are not held meanwhile:
    the source is read again.

    Runs in the main process: workers would each read it all. `batch_loader` puts the work on items in workers.

    Args:
        source: items. It is this stream's alone: its state is taken and loaded.
        planner: the rule.
        length: of an item, in tokens.
        window: items that are planned together, at most. They lie in memory.
        shuffle: the batches of a window. The order of items is the source's.
        seed: of that.
        rank, world_size: by default those of torch.distributed, once it is initialised.
        remainder: as for `LengthBatchSampler`, at the end of the source's epoch.

    Raises:
        TypeError, ValueError: an argument does not fit, or an item is too long; the message names it.
    """

    def __init__(
        self,
        source: Source[Any],
        planner: BatchPlanner,
        *,
        length: Callable[[Any], int] = len,
        window: int = 10_000,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        remainder: str = "drop",
    ) -> None:
        if not isinstance(source, Source):
            raise TypeError(
                f"source must have __iter__, state_dict and load_state_dict, as seqwarm_kernels.data.Source, got "
                f"{type(source).__name__}"
            )
        if not callable(length):
            raise TypeError(f"length must be a function, got {type(length).__name__}")
        split = getattr(source, "world_size", 1)
        if split != 1:
            raise ValueError(
                f"source must not be split by rank, got world_size {split}: every rank reads it all and "
                "takes its own batches"
            )
        if isinstance(planner, BatchPlanner) and planner.by_bucket and getattr(source, "infinite", False):
            raise ValueError(
                "source must end its epochs, got infinite=True with warmup='bucket': long items wait for the end of "
                "an epoch; iterate over the stream once for each"
            )
        check_int("window", window, minimum=1)
        check_bool("shuffle", shuffle)
        check_int("seed", seed, minimum=0)
        super().__init__(
            SourceReader(source, length),
            planner,
            window=window,
            seed=seed if shuffle else None,
            rank=rank,
            world_size=world_size,
            remainder=remainder,
            infinite=False,
            settings={},
        )

    def __iter__(self) -> BatchIterator:
        if get_worker_info() is not None:
            raise ValueError(
                "num_workers must be 0: each worker would read the whole stream; batch_loader has workers for what "
                "follows the planner"
            )
        return super().__iter__()

    def _begin(self) -> Deal:
        return self._at

    def _progress(self, start: Start, counts: Counts) -> Progress:
        return Progress(*counts, epochs=start.epoch)
