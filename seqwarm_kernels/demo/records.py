"""Measurements of each evaluation, and the comparison of the two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

BASELINE = "baseline"
WARMUP = "warmup"
RUNS = (BASELINE, WARMUP)


@dataclass(frozen=True)
class Record:
    """One evaluation of one run. Seconds are those of training only. Losses are in nats per byte."""

    run: str
    step: int
    tokens: int
    seconds: float
    seq_length: int  #: of the last training step; before the first step, that of the first step
    learning_rate: float  #: of the last training step; 0 before the first step
    train_loss: float | None  #: mean since the previous evaluation, at the lengths trained on
    validation_loss: float  #: at the full length


@dataclass(frozen=True)
class Crossing:
    """The time and the tokens at which a run first reached a loss."""

    seconds: float
    tokens: float


def first_reaches(records: Sequence[Record], loss: float) -> Crossing | None:
    """Returns the first crossing of `loss`, linearly interpolated between evaluations, or None without a crossing."""
    if records[0].validation_loss <= loss:
        return Crossing(records[0].seconds, records[0].tokens)
    for before, after in pairwise(records):
        if after.validation_loss <= loss:
            share = (before.validation_loss - loss) / (before.validation_loss - after.validation_loss)
            seconds = before.seconds + share * (after.seconds - before.seconds)
            return Crossing(seconds, before.tokens + share * (after.tokens - before.tokens))
    return None


def full_length_speed(records: Sequence[Record]) -> float | None:
    """Returns tokens per second at the full length, or None if no two evaluations enclose only full-length steps."""
    full_length = records[-1].seq_length
    pairs = [(a, b) for a, b in pairwise(records) if a.seq_length == b.seq_length == full_length]
    seconds = sum(after.seconds - before.seconds for before, after in pairs)
    return sum(after.tokens - before.tokens for before, after in pairs) / seconds if seconds else None


class Comparison:
    """Both finished runs, measured against the baseline's final loss."""

    def __init__(self, baseline: Sequence[Record], warmup: Sequence[Record]) -> None:
        self.baseline, self.warmup = baseline, warmup
        self.target = baseline[-1].validation_loss
        #: Before the baseline's end if its loss rose again: the same rule for both runs.
        self.baseline_crossing = first_reaches(baseline, self.target)
        self.warmup_crossing = first_reaches(warmup, self.target)

    @staticmethod
    def of(records: Sequence[Record]) -> Comparison:
        return Comparison(*([record for record in records if record.run == run] for run in RUNS))

    def headline(self) -> str:
        """Returns the result in a sentence."""
        ours, theirs = self.warmup_crossing, self.baseline_crossing
        assert theirs is not None  # its last record is at the target
        if ours is None:
            return (
                f"Sequence-length warmup did not reach the baseline's final validation loss of {self.target:.4f}: "
                f"it ended at {self.warmup[-1].validation_loss:.4f} after as many tokens."
            )
        return (
            f"Sequence-length warmup reached the baseline's final validation loss of {self.target:.4f}: "
            f"{_sooner(ours.tokens, theirs.tokens)} in tokens "
            f"({ours.tokens / 1e6:.2f} M instead of {theirs.tokens / 1e6:.2f} M), "
            f"{_sooner(ours.seconds, theirs.seconds)} in seconds "
            f"({ours.seconds:.1f} s instead of {theirs.seconds:.1f} s)."
        )


def _sooner(ours: float, theirs: float) -> str:
    if ours <= theirs:
        return f"{theirs / ours:.2f} times sooner" if ours else "at once"
    return f"{ours / theirs:.2f} times later" if theirs else "later"
