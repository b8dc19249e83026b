"""The rules that group items into batches, from their lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...schedule.scheduler import SequenceLengthScheduler
from ...utils.checks import check_choice, check_int
from .packed import pack
from .padded import greedy_boundaries, reduce_padding
from .plan import TRUNCATED, IntArray, Plan, as_lengths, sums


class BatchPlanner:
    """Groups items of similar length into batches under a hard budget of tokens, padding included.

    Items are sorted, longest first, and divided into as few batches as the budget allows. Where the budget leaves
    room, batch boundaries are moved to save padding. Packed batches have no padding: whole items fill the budget, one
    after another.

    Args:
        max_tokens: maximum of rows times padded length of a batch; for packed batches, maximum number of tokens.
        batch_size: maximum number of rows of a batch. Without `max_tokens`, all batches of a window but one have
            exactly this many rows.
        multiple_of: lengths are padded to a multiple of this. Items without tokens are padded to it as well.
        max_length: maximum length of a sequence: an int, or a `SequenceLengthScheduler`. With a scheduler, the current
            length follows its curve, as `warmup` says, by the steps, tokens or items that were yielded. The scheduler's
            own progress is ignored, because loaders run ahead of training. Default: the longest sequence that fits the
            budget, or unlimited without a budget.
        too_long: what happens to items longer than `max_length` (a scheduler's max_seq_length) or than the budget:
            "reject" raises, "truncate" keeps the first tokens, "split" divides them into several sequences.
        warmup: with a scheduler, what happens to items longer than the current length. "bucket" yields them later in
            the epoch: short sequences first, as in Dataset Decomposition (arXiv 2405.13226). Once no short item is
            left in the epoch, the next longer ones are yielded. "cut" truncates them, or splits them if `too_long` is
            "split". The number of tokens in a step is constant with `max_tokens`, the number of rows with
            `batch_size`. Default: "bucket".
        packed: plan batches for `PackedCollator`.

    Raises:
        ValueError: an argument has an invalid value, or contradicts another.
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        *,
        batch_size: int | None = None,
        multiple_of: int = 1,
        max_length: int | SequenceLengthScheduler | None = None,
        too_long: str = "reject",
        warmup: str | None = None,
        packed: bool = False,
    ) -> None:
        if max_tokens is None and batch_size is None:
            raise ValueError("max_tokens or batch_size must be given, got None for both")
        check_choice("too_long", too_long, ("reject", "truncate", "split"))
        if warmup is not None:
            check_choice("warmup", warmup, ("bucket", "cut"))
            if not isinstance(max_length, SequenceLengthScheduler):
                raise ValueError(f"warmup needs a SequenceLengthScheduler as max_length, got {max_length!r}")
        if packed and (max_tokens is None or batch_size is not None or multiple_of != 1):
            raise ValueError(
                f"packed=True needs max_tokens alone, got {max_tokens}, batch_size {batch_size} and multiple_of "
                f"{multiple_of}"
            )
        self.max_tokens = None if max_tokens is None else check_int("max_tokens", max_tokens, minimum=1)
        self.batch_size = None if batch_size is None else check_int("batch_size", batch_size, minimum=1)
        self.multiple_of = check_int("multiple_of", multiple_of, minimum=1)
        self.scheduler = max_length if isinstance(max_length, SequenceLengthScheduler) else None
        self.too_long = too_long
        self.warmup = warmup or "bucket"
        self.packed = packed
        #: Maximum length of any sequence; None: unlimited.
        self.longest = self._longest(self.scheduler.max_seq_length if self.scheduler else max_length)

    @property
    def by_bucket(self) -> bool:
        """Whether items longer than the current length are yielded later."""
        return self.scheduler is not None and self.warmup == "bucket"

    @property
    def cuts_items(self) -> bool:
        """Whether a batch may hold parts of items."""
        return self.too_long != "reject" or (self.scheduler is not None and self.warmup == "cut")

    def plan(
        self,
        lengths: Sequence[int] | NDArray[Any],
        *,
        max_length: int | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Plan:
        """Plan the batches of all items, longest items first, or in the random order given by `seeds`.

        Args:
            lengths: (items,) ints, tokens, at least 0.
            max_length: the current length, at least 1; longer items are cut to it.
            seeds: ints, at least 0.

        Raises:
            ValueError: `lengths` are not counts of tokens, or an item is too long and `too_long` is "reject".
        """
        lengths = as_lengths(lengths)
        self.check(lengths)
        pieces, starts, lengths = self._pieces(lengths, max_length)
        order, boundaries = self._group(lengths)
        items = order if pieces is None else pieces[order]
        starts = starts if pieces is None else starts[order]
        lengths = lengths[order]
        begins, ends = boundaries[:-1], boundaries[1:]
        if seeds is not None:
            # NumPy keeps seed sequences stable across versions, so a state stays valid after an upgrade of NumPy.
            shuffled = np.argsort(np.random.SeedSequence(seeds).generate_state(len(begins), np.uint64))
            begins, ends = begins[shuffled], ends[shuffled]
        padded_tokens = sums(lengths, begins, ends) if self.packed else (ends - begins) * self.widths(lengths[begins])
        return Plan(items, starts, lengths, begins, ends, padded_tokens)

    def tokens(self, lengths: IntArray, max_length: int | None = None) -> IntArray:
        """(items,) int64: number of tokens of each item that are yielded, after truncation."""
        bound = self._bound(max_length)
        return lengths if bound is None or self.too_long == "split" else np.minimum(lengths, bound)

    def ends(self, lengths: IntArray, max_length: int | None = None) -> IntArray:
        """(items,) int64: where each item has to end. `TRUNCATED` where it may be longer."""
        bound = self.longest if self.by_bucket else self._bound(max_length)
        if bound is None or self.too_long == "split":
            return lengths
        return np.where(lengths < bound, lengths, TRUNCATED)

    def widths(self, lengths: IntArray) -> IntArray:
        """(items,) int64: lengths rounded up to a positive multiple of `multiple_of`."""
        multiple = self.multiple_of
        return np.maximum(lengths if multiple == 1 else -(-lengths // multiple) * multiple, multiple)

    def check(self, lengths: IntArray, first_item: int = 0) -> None:
        """Raise ValueError if an item is too long. The error counts items from `first_item`."""
        if self.too_long != "reject" or self.longest is None:
            return
        if int(lengths.max(initial=0)) > self.longest:
            item = int((lengths > self.longest).argmax())
            raise ValueError(
                f"item {first_item + item} has {lengths[item]} tokens, more than {self.longest}, which max_length and "
                "max_tokens allow; pass too_long='truncate' or 'split'"
            )

    def configuration(self) -> dict[str, Any]:
        """The settings that determine the batches, JSON-able."""
        scheduler = self.scheduler
        return {
            "max_tokens": self.max_tokens,
            "batch_size": self.batch_size,
            "multiple_of": self.multiple_of,
            "max_length": self.longest if scheduler is None else {**scheduler.state_dict(), "progress": 0},
            "too_long": self.too_long,
            "warmup": None if scheduler is None else self.warmup,
            "packed": self.packed,
        }

    def _longest(self, max_length: Any) -> int | None:
        room = None if self.max_tokens is None else self.max_tokens // self.multiple_of * self.multiple_of
        if room == 0:
            raise ValueError(f"max_tokens must be at least multiple_of {self.multiple_of}, got {self.max_tokens}")
        if max_length is None:
            return room
        max_length = check_int("max_length", max_length, minimum=1)
        if room is not None and max_length > room:
            raise ValueError(f"max_length must be at most {room}, for max_tokens to hold one row, got {max_length}")
        return max_length

    def _bound(self, max_length: int | None) -> int | None:
        """Maximum length of a sequence; None: unlimited."""
        return min((bound for bound in (max_length, self.longest) if bound is not None), default=None)

    def _pieces(self, lengths: IntArray, max_length: int | None) -> tuple[IntArray | None, IntArray, IntArray]:
        """Items, starts and lengths of the pieces. The items are None if each item is one piece."""
        zeros = np.zeros(len(lengths), dtype=np.int64)
        bound = self._bound(max_length)
        if bound is None or self.too_long != "split":
            return None, zeros, self.tokens(lengths, max_length)
        counts = np.maximum(-(-lengths // bound), 1)
        items = np.repeat(np.arange(len(lengths)), counts)
        starts = (np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)) * bound
        return items, starts, np.minimum(lengths[items] - starts, bound)

    def _group(self, lengths: IntArray) -> tuple[IntArray, IntArray]:
        """The pieces in the order of their batches, and the batch boundaries. Equal widths keep their order."""
        if self.packed:
            assert self.max_tokens is not None
            return pack(lengths, self.max_tokens)
        widths = self.widths(lengths)
        shorter = widths.max(initial=0) - widths
        if shorter.max(initial=0) < 2**16:
            shorter = shorter.astype(np.uint16)  # NumPy sorts uint16 with radix sort
        order = np.argsort(shorter, kind="stable")
        widths = widths[order]
        boundaries = greedy_boundaries(widths, self.max_tokens, self.batch_size)
        if self.max_tokens is not None:
            boundaries = reduce_padding(widths, boundaries, self.max_tokens, self.batch_size)
        return order, np.asarray(boundaries, dtype=np.int64)
