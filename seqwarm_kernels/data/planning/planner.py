"""The rule by which items become batches, from their lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...schedule.scheduler import SequenceLengthScheduler
from ...utils.checks import check_bool, check_int
from .lengths import as_lengths, check_size
from .packed import pack
from .padded import greedy_cuts, least_padding
from .plan import IntArray, Plan

TOO_LONG = ("reject", "truncate", "split")
WARMUPS = ("bucket", "cut")


class BatchPlanner:
    """Batches of items of similar length under a hard budget of tokens, padding included.

    Items are taken longest first and cut into as few batches as the budget allows; where that leaves room, cuts are
    moved to where they save padding. Packed batches have no padding: whole items fill the budget, one after another.

    Args:
        max_tokens: rows times padded length of a batch, at most; of a packed batch, tokens.
        batch_size: rows of a batch, at most. Without `max_tokens` all batches of a window but one have as many.
        multiple_of: lengths are padded to a multiple of this. Items of no tokens take that much room, too.
        max_length: no sequence is longer. An int, or a `SequenceLengthScheduler`, whose curve the present length then
            follows, as `warmup` says. What was handed out is counted (steps, tokens or items); the scheduler's own
            progress is not looked at, since loaders work ahead of training. By default what the budget can hold, or
            any length without one.
        too_long: what becomes of items longer than `max_length` (a scheduler's max_seq_length) or than the budget:
            "reject" raises, "truncate" keeps the first tokens, "split" makes them several sequences.
        warmup: with a scheduler, what becomes of items longer than the present length. "bucket" keeps them for later in
            the epoch: short sequences first, as in Dataset Decomposition (arXiv 2405.13226); where nothing short is
            left of it, the next longer ones come. "cut" truncates them, or splits them if `too_long` is "split".
            Tokens in a step stay the same under `max_tokens`, rows under `batch_size`. Default "bucket".
        packed: plan for `PackedCollator`.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
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
        for name, value in (("max_tokens", max_tokens), ("batch_size", batch_size)):
            if value is not None:
                check_size(name, value)
        check_size("multiple_of", multiple_of)
        if too_long not in TOO_LONG:
            raise ValueError(f"too_long must be one of {', '.join(TOO_LONG)}, got {too_long!r}")
        if warmup is not None:
            _check_warmup(warmup, max_length)
        check_bool("packed", packed)
        if packed:
            _check_packed(max_tokens, batch_size, multiple_of)
        self.scheduler = max_length if isinstance(max_length, SequenceLengthScheduler) else None
        self.max_tokens = max_tokens
        self.batch_size = batch_size
        self.multiple_of = multiple_of
        self.too_long = too_long
        self.warmup = warmup or "bucket"
        self.packed = packed
        #: No sequence is ever longer than this; None: no bound.
        self.longest = self._longest(max_length)

    @property
    def by_bucket(self) -> bool:
        """Whether items longer than the present length are kept for later."""
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
        first: int = 0,
    ) -> Plan:
        """Batches of all items, those with the longest ones first, or in the random order that `seeds` names.

        Args:
            lengths: (items,) ints, tokens, at least 0.
            max_length: the present length, at least 1; longer items are cut to it.
            seeds: ints of at least 0.
            first: what errors call item 0.

        Raises:
            TypeError, ValueError: no lengths, or an item is too long and `too_long` is "reject".
        """
        lengths = as_lengths(lengths)
        if seeds is not None:
            _check_seeds(seeds)
        self.check(lengths, first)
        pieces, starts, lengths = self._pieces(lengths, max_length)
        order, cuts = self._pack(lengths) if self.packed else self._pad(lengths)
        items = order if pieces is None else pieces[order]
        starts = starts if pieces is None else starts[order]
        lengths = lengths[order]
        begins, ends = cuts[:-1], cuts[1:]
        plan = Plan(items, starts, lengths, begins, ends, self._padded_tokens(lengths, begins, ends))
        if seeds is None:
            return plan
        # Seed sequences are made to stay the same, so a state outlives an upgrade of NumPy.
        return plan.in_order(np.argsort(np.random.SeedSequence(seeds).generate_state(len(plan), np.uint64)))

    def num_batches(self, lengths: IntArray, max_length: int | None = None) -> int:
        """How many batches `plan` makes, for less work."""
        _, _, lengths = self._pieces(lengths, max_length)
        if self.packed:
            return len(pack(lengths, self._budget).cuts) - 1
        return len(greedy_cuts(-np.sort(-self.widths(lengths)), self.max_tokens, self.batch_size)) - 1

    def tokens(self, lengths: IntArray, max_length: int | None = None) -> IntArray:
        """(items,) int64: what is left of each item once it is cut."""
        bound = self._bound(max_length)
        return lengths if bound is None or self.too_long == "split" else np.minimum(lengths, bound)

    def widths(self, lengths: IntArray) -> IntArray:
        """(items,) int64: lengths rounded up to `multiple_of`, at least one of it."""
        multiple = self.multiple_of
        return np.maximum(lengths if multiple == 1 else -(-lengths // multiple) * multiple, multiple)

    def check(self, lengths: IntArray, first: int = 0) -> None:
        """Raise if an item is too long; `first` is what the error calls item 0."""
        if self.too_long != "reject" or self.longest is None:
            return
        if int(lengths.max(initial=0)) > self.longest:
            item = int((lengths > self.longest).argmax())
            raise ValueError(
                f"item {first + item} has {lengths[item]} tokens, more than {self._reason()}; "
                "too_long='truncate' or 'split' takes such items"
            )

    def configuration(self) -> dict[str, Any]:
        """JSON-able: what decides the batches."""
        settings = self.scheduler
        return {
            "max_tokens": self.max_tokens,
            "batch_size": self.batch_size,
            "multiple_of": self.multiple_of,
            "max_length": self.longest if settings is None else {**settings.state_dict(), "progress": 0},
            "too_long": self.too_long,
            "warmup": self.warmup if settings is not None else None,
            "packed": self.packed,
        }

    @property
    def _budget(self) -> int:
        assert self.max_tokens is not None
        return self.max_tokens

    def _longest(self, max_length: int | SequenceLengthScheduler | None) -> int | None:
        room = None if self.max_tokens is None else self.max_tokens // self.multiple_of * self.multiple_of
        if room == 0:
            raise ValueError(f"max_tokens must be at least multiple_of {self.multiple_of}, got {self.max_tokens}")
        if max_length is None:
            return room
        name = "max_length"
        if isinstance(max_length, SequenceLengthScheduler):
            name, max_length = "max_seq_length of the scheduler", max_length.max_seq_length
        check_size(name, max_length)
        if room is not None and max_length > room:
            raise ValueError(f"{name} must be at most {room}, for max_tokens to hold one row, got {max_length}")
        return max_length

    def _bound(self, max_length: int | None) -> int | None:
        """Tokens of a sequence, at most."""
        if max_length is not None:
            check_int("max_length", max_length, minimum=1)
        return min((bound for bound in (max_length, self.longest) if bound is not None), default=None)

    def _reason(self) -> str:
        if self.max_tokens is not None and self.longest == self.max_tokens // self.multiple_of * self.multiple_of:
            return f"max_tokens {self.max_tokens} can hold"
        return f"max_length {self.longest}"

    def _pieces(self, lengths: IntArray, max_length: int | None) -> tuple[IntArray | None, IntArray, IntArray]:
        """Items, starts and lengths of what the items are cut to; items None: each is one piece."""
        whole = np.zeros(len(lengths), dtype=np.int64)
        bound = self._bound(max_length)
        if bound is None or int(lengths.max(initial=0)) <= bound:
            return None, whole, lengths
        if self.too_long != "split":
            return None, whole, np.minimum(lengths, bound)
        counts = np.maximum(-(-lengths // bound), 1)
        items = np.repeat(np.arange(len(lengths)), counts)
        starts = (np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)) * bound
        return items, starts, np.minimum(lengths[items] - starts, bound)

    def _pad(self, lengths: IntArray) -> tuple[IntArray, IntArray]:
        """The pieces in the order of their batches, and the cuts between these. Equal widths keep their order."""
        widths = self.widths(lengths)
        shorter = widths.max(initial=0) - widths
        if shorter.max(initial=0) < 2**16:
            shorter = shorter.astype(np.uint16)  # NumPy sorts these by radix
        order = np.argsort(shorter, kind="stable")
        widths = widths[order]
        cuts = greedy_cuts(widths, self.max_tokens, self.batch_size)
        if self.max_tokens is not None:
            cuts = least_padding(widths, cuts, self.max_tokens, self.batch_size)
        return order, np.asarray(cuts, dtype=np.int64)

    def _pack(self, lengths: IntArray) -> tuple[IntArray, IntArray]:
        packs = pack(lengths, self._budget)
        return packs.order, packs.cuts

    def _padded_tokens(self, lengths: IntArray, begins: IntArray, ends: IntArray) -> IntArray:
        if self.packed:
            sums = np.append(0, np.cumsum(lengths))
            return sums[ends] - sums[begins]
        return (ends - begins) * self.widths(lengths[begins])


def _check_warmup(warmup: str, max_length: int | SequenceLengthScheduler | None) -> None:
    if warmup not in WARMUPS:
        raise ValueError(f"warmup must be one of {', '.join(WARMUPS)}, got {warmup!r}")
    if not isinstance(max_length, SequenceLengthScheduler):
        raise ValueError(
            f"warmup needs a SequenceLengthScheduler as max_length, got warmup {warmup!r} and max_length {max_length!r}"
        )


def _check_seeds(seeds: Sequence[int]) -> None:
    if isinstance(seeds, (int, str)) or not hasattr(seeds, "__iter__"):
        raise TypeError(f"seeds must be a sequence of ints, got {type(seeds).__name__}")
    for number, seed in enumerate(seeds):
        check_int(f"seeds[{number}]", seed, minimum=0)


def _check_packed(max_tokens: int | None, batch_size: int | None, multiple_of: int) -> None:
    if max_tokens is None:
        raise ValueError("max_tokens must be given with packed=True, got None")
    if batch_size is not None:
        raise ValueError(f"batch_size must be None with packed=True: packs are filled by tokens, got {batch_size}")
    if multiple_of != 1:
        raise ValueError(f"multiple_of must be 1 with packed=True: packs have no padding, got {multiple_of}")
