"""Batches of a data set with known lengths, for DataLoader's `batch_sampler`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray
from torch.utils.data import Sampler

from ...utils.checks import check_int
from ..batch_planning.plan import as_lengths
from ..batch_planning.planner import BatchPlanner
from .planned_batches import PlannedBatches
from .rank_batches import RankBatches
from .readers import IndexReader
from .state import Counts


class LengthBatchSampler(PlannedBatches, Sampler[list[Any]]):
    """Yields lists of indices of items of similar length, the same number of lists on every rank.

    Example::

        sampler = LengthBatchSampler(lengths, BatchPlanner(max_tokens=16384), window=10_000)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PaddedCollator(), num_workers=4)
        loader = ResumableLoader(loader)

    The items of an epoch are shuffled, divided into windows, and planned window by window. Each step has `world_size`
    batches, one for each rank.

    Each `iter()` yields the next epoch, also if the last one was interrupted, or the rest of an epoch after
    `load_state_dict` (empty if the state was taken after its last batch). `set_epoch` selects another epoch. An
    `infinite` sampler goes on after its last batch.

    A planner that may cut items yields a `Piece` for each index: wrap the data set in `PieceDataset`.

    The state counts the batches that this sampler has yielded. A DataLoader with workers fetches batches ahead of
    training: take the state of `ResumableLoader`, or of torchdata's StatefulDataLoader.

    Args:
        lengths: (items,) ints, tokens of each item.
        planner: divides the items of a window into batches.
        window: maximum number of items that are planned together; None: the whole epoch, which saves the most padding
            and takes one to three seconds for ten million items.
        shuffle: shuffle the items in each epoch, and the batches of each window. If False, items keep their order, and
            the batches of a window are yielded longest first.
        seed: seed of both orders.
        infinite: yield one epoch after another in a single `iter()`, without a remainder between epochs.
        rank, world_size: default: those of torch.distributed if it is initialized, else 0 and 1.
        remainder: what happens to the last batches of an epoch that are too few for all ranks. "drop" drops them;
            "repeat" repeats other batches of the last window; "empty", for evaluation, yields every item exactly
            once, and [] on ranks that run out, which `PaddedCollator` and `PackedCollator` turn into a batch of padding
            without labels.

    Raises:
        ValueError: an argument has an invalid value, or an item is too long.
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
        own_lengths = as_lengths(lengths).copy()  # the caller may change its array
        planner.check(own_lengths)
        order_seed = check_int("seed", seed, minimum=0) if shuffle else None
        self.num_items = len(own_lengths)  #: number of lengths
        self._num_batches: dict[tuple[int, Counts], int] = {}  # of the epoch that was planned last
        super().__init__(
            IndexReader(own_lengths, order_seed, whole=window is None),
            planner,
            window=window,
            seed=order_seed,
            rank=rank,
            world_size=world_size,
            remainder=remainder,
            infinite=infinite,
        )
        self._configuration |= {"num_items": self.num_items, "lengths": zlib.crc32(own_lengths.tobytes())}

    def __len__(self) -> int:
        """Number of batches of the epoch for this rank.

        Plans the whole epoch. A schedule continues from its progress at the start of the epoch.
        """
        if self._current.infinite:
            raise TypeError("an infinite LengthBatchSampler has no length")
        start = self.position.epoch, self.position.epoch_start
        if start not in self._num_batches:
            rank_batches = self._rank_batches(self._maker.epoch_start(*start))
            self._num_batches = {start: sum(1 for _ in iter(rank_batches.step, None))}
        return self._num_batches[start]

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, or the next epoch once the end of an epoch was reached."""
        return self.position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Start the next `iter()` at the beginning of this epoch, or where a state of it was just loaded.

        An infinite sampler continues from any state that was just loaded: a trainer counts its epochs otherwise.
        """
        position = self.position
        is_same_epoch = epoch == position.epoch
        if self._start_is_set and (is_same_epoch or (self._current.infinite and position.yielded.batches)):
            return
        yielded = position.epoch_start if is_same_epoch else position.yielded
        self.move_to(self._maker.epoch_start(epoch, yielded))

    def _next_pass(self) -> RankBatches:
        return self._current if self._current.infinite else self._rank_batches(self._current.next_epoch())
