"""What padding costs: the three settings of a well-known post on dynamic batching of 2020, and ours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...utils.checks import check_int
from ..batching.sampler import LengthBatchSampler
from ..planning.padded import greedy_boundaries
from ..planning.plan import IntArray, check_size
from ..planning.planner import BatchPlanner
from ..sources.permutation import permuted


@dataclass(frozen=True)
class Batching:
    """All batches of a corpus by one setting."""

    name: str
    rows: IntArray  #: (batches,) int64, items of a batch
    tokens: IntArray  #: (batches,) int64, without padding
    padded_tokens: IntArray  #: (batches,) int64
    max_tokens: int | None  #: the budget, None where rows are counted

    @property
    def padding(self) -> float:
        """Share of all tokens, 0 without any."""
        total = int(self.padded_tokens.sum())
        return 1 - int(self.tokens.sum()) / total if total else 0.0

    @property
    def budget_used(self) -> float | None:
        """Share of the budget that is text, over all batches."""
        if self.max_tokens is None:
            return None
        return int(self.tokens.sum()) / (len(self.tokens) * self.max_tokens)


@dataclass(frozen=True)
class Settings:
    batch_size: int = 32
    short_window: int = 320
    max_tokens: int = 16_384
    window: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "short_window", "max_tokens", "window"):
            check_size(name, getattr(self, name))
        check_int("seed", self.seed, minimum=0)


def compare(lengths: IntArray, settings: Settings) -> list[Batching]:
    """Every setting on the same items in the same random order. Longer items than the budget are cut to it."""
    lengths = np.minimum(lengths, settings.max_tokens)
    size, budget, window = settings.batch_size, settings.max_tokens, settings.window
    by_rows = BatchPlanner(batch_size=size)
    budgeted = f"budget {budget:,}, window {window:,}"
    return [
        _sampled(f"random batches of {size}", by_rows, lengths, size, settings.seed),
        _sampled(
            f"window of {settings.short_window}, batches of {size}", by_rows, lengths, settings.short_window,
            settings.seed,
        ),
        _greedy(f"{budgeted}, infinibatch's rule", budget, lengths, window, settings.seed),
        _sampled(f"{budgeted}, BatchPlanner", BatchPlanner(budget), lengths, window, settings.seed),
        _sampled(f"{budgeted}, packed", BatchPlanner(budget, packed=True), lengths, window, settings.seed),
    ]  # fmt: skip


def _sampled(name: str, planner: BatchPlanner, lengths: IntArray, window: int, seed: int) -> Batching:
    """An epoch as training would get it."""
    batches = list(LengthBatchSampler(lengths, planner, window=window, seed=seed, rank=0, world_size=1))
    rows = np.array([len(batch) for batch in batches])
    begins, chosen = np.cumsum(rows) - rows, lengths[np.concatenate(batches)]
    tokens = np.add.reduceat(chosen, begins)
    padded_tokens = tokens if planner.packed else rows * planner.widths(np.maximum.reduceat(chosen, begins))
    return Batching(name, rows, tokens, padded_tokens, planner.max_tokens)


def _greedy(name: str, max_tokens: int, lengths: IntArray, window: int, seed: int) -> Batching:
    """As many rows as the budget holds of the longest one, which comes first."""
    lengths = lengths[permuted(np.arange(len(lengths)), len(lengths), seed, 0)]  # as the sampler does
    parts: list[list[IntArray]] = [[], [], []]
    for begin in range(0, len(lengths), window):
        falling = -np.sort(-lengths[begin : begin + window])
        widths = np.maximum(falling, 1)  # an item of no tokens takes room, too
        cuts = np.asarray(greedy_boundaries(widths, max_tokens, None))
        rows = np.diff(cuts)
        for part, found in zip(
            parts, (rows, np.add.reduceat(falling, cuts[:-1]), rows * widths[cuts[:-1]]), strict=True
        ):
            part.append(found)
    rows, tokens, padded_tokens = map(np.concatenate, parts)
    return Batching(name, rows, tokens, padded_tokens, max_tokens)


def table(batchings: list[Batching]) -> str:
    header = f"{'':<50}{'batches':>9}{'rows':>16}{'tokens':>9}{'padding':>9}{'budget used':>13}"
    lines = [header]
    for each in batchings:
        fewest, most = int(each.rows.min()), int(each.rows.max())
        rows = f"{fewest:,} to {most:,}" if fewest < most else f"{most:,}"
        used = "" if each.budget_used is None else f"{each.budget_used:.1%}"
        lines.append(
            f"{each.name:<50}{len(each.rows):>9,}{rows:>16}{each.tokens.mean():>9,.0f}{each.padding:>9.1%}{used:>13}"
        )
    lines.append("Rows and tokens are of one batch, tokens on average and without padding.")
    return "\n".join(lines)
