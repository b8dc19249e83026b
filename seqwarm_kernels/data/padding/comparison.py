"""Padding of five ways of batching: three of a 2020 blog post on dynamic batching, and two of `BatchPlanner`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from ...utils.checks import check_int
from ..batch_planning.padded import greedy_boundaries
from ..batch_planning.plan import IntArray, as_lengths, check_size
from ..batch_planning.planner import BatchPlanner
from ..samplers.sampler import LengthBatchSampler
from ..sources.permutation import permuted

#: Headers of `BatchingResult.cells`.
COLUMNS = ("batching", "batches", "items per batch", "tokens per batch", "padding", "budget used")


#: What the words of the table mean.
NOTES = (
    "window: number of items that are sorted by length together.",
    "budget: most tokens that a batch may have, padding included.",
    "greedy: the longest items first, batch after batch filled up to the budget, as the library infinibatch does.",
    "BatchPlanner: as many batches as greedy, with boundaries that cost less padding.",
    "packed: items one after another in one row, without padding.",
    "tokens per batch: average, without padding.",
)


@dataclass(frozen=True)
class BatchingSettings:
    """Settings of the comparison.

    Attributes:
        batch_size: items per batch, for the two ways without a token budget.
        short_window: items that are sorted together, for batches of `batch_size`.
        max_tokens: token budget of a batch, padding included, for the other three ways.
        window: items that are sorted together, for the other three ways.
        seed: determines the order of the items.
    """

    batch_size: int = 32
    short_window: int = 320
    max_tokens: int = 16_384
    window: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "short_window", "max_tokens", "window"):
            object.__setattr__(self, name, check_size(name, getattr(self, name)))  # frozen
        object.__setattr__(self, "seed", check_int("seed", self.seed, minimum=0))


@dataclass(frozen=True)
class BatchingResult:
    """The sizes of all batches of one way of batching."""

    name: str
    items: IntArray  #: (batches,) int64, number of items
    tokens: IntArray  #: (batches,) int64, number of tokens without padding
    padded_tokens: IntArray  #: (batches,) int64, number of tokens with padding
    max_tokens: int | None  #: the token budget, None without one

    @property
    def padding(self) -> float:
        """Share of padding in all tokens, 0 if there are no tokens."""
        total = int(self.padded_tokens.sum())
        return 1 - int(self.tokens.sum()) / total if total else 0.0

    @property
    def budget_used(self) -> float | None:
        """Share of the token budget that is text, over all batches."""
        if self.max_tokens is None:
            return None
        return int(self.tokens.sum()) / (len(self.tokens) * self.max_tokens)

    def cells(self) -> tuple[str, ...]:
        """One row of a table, in the order of `COLUMNS`."""
        fewest, most = int(self.items.min()), int(self.items.max())
        return (
            self.name,
            f"{len(self.items):,}",
            f"{fewest:,} to {most:,}" if fewest < most else f"{most:,}",
            f"{self.tokens.mean():,.0f}",
            f"{self.padding:.1%}",
            "" if self.budget_used is None else f"{self.budget_used:.1%}",
        )


def compare(lengths: IntArray, settings: BatchingSettings) -> list[BatchingResult]:
    """Batch the same items in the same random order in five ways.

    Args:
        lengths: (items,) int64, number of tokens in each item. Items longer than the token budget are truncated to it.
        settings: batch sizes, budget, windows and seed of the five ways.

    Raises:
        TypeError: `lengths` are not ints, or `settings` are not `BatchingSettings`.
        ValueError: a length is negative, or there are none.
    """
    lengths = as_lengths(lengths)
    if not len(lengths):
        raise ValueError("lengths must have at least one item, got none")
    if not isinstance(settings, BatchingSettings):
        raise TypeError(f"settings must be BatchingSettings, got {type(settings).__name__}")
    lengths = np.minimum(lengths, settings.max_tokens)
    size, budget, window, seed = settings.batch_size, settings.max_tokens, settings.window, settings.seed
    by_size = BatchPlanner(batch_size=size)
    by_budget = f"budget {budget:,}, window {window:,}"
    sorted_name = f"window of {settings.short_window}, batches of {size}"
    return [
        _sampled(f"random batches of {size}", by_size, lengths, size, seed),
        _sampled(sorted_name, by_size, lengths, settings.short_window, seed),
        _greedy(f"{by_budget}, greedy", budget, lengths, window, seed),
        _sampled(f"{by_budget}, BatchPlanner", BatchPlanner(budget), lengths, window, seed),
        _sampled(f"{by_budget}, packed", BatchPlanner(budget, packed=True), lengths, window, seed),
    ]


def _sampled(name: str, planner: BatchPlanner, lengths: IntArray, window: int, seed: int) -> BatchingResult:
    """One epoch of a `LengthBatchSampler`."""
    batches = list(LengthBatchSampler(lengths, planner, window=window, seed=seed, rank=0, world_size=1))
    items = np.array([len(batch) for batch in batches])
    begins, batched_lengths = np.cumsum(items) - items, lengths[np.concatenate(batches)]
    tokens = np.add.reduceat(batched_lengths, begins)
    padded_tokens = tokens if planner.packed else items * planner.widths(np.maximum.reduceat(batched_lengths, begins))
    return BatchingResult(name, items, tokens, padded_tokens, planner.max_tokens)


def _greedy(name: str, max_tokens: int, lengths: IntArray, window: int, seed: int) -> BatchingResult:
    """Sort each window by length, then fill batch after batch up to the token budget, as infinibatch does."""
    lengths = lengths[permuted(np.arange(len(lengths)), len(lengths), seed, 0)]  # the order of the sampler
    parts: list[tuple[IntArray, IntArray, IntArray]] = []
    for begin in range(0, len(lengths), window):
        descending = -np.sort(-lengths[begin : begin + window])
        widths = np.maximum(descending, 1)  # the row of an item without tokens has one slot of padding
        boundaries = np.asarray(greedy_boundaries(widths, max_tokens, None))
        items, begins = np.diff(boundaries), boundaries[:-1]
        parts.append((items, np.add.reduceat(descending, begins), items * widths[begins]))
    items, tokens, padded_tokens = map(np.concatenate, zip(*parts, strict=True))
    return BatchingResult(name, items, tokens, padded_tokens, max_tokens)


def check_results(results: object) -> None:
    """`results` must be what `compare` returns."""
    if not isinstance(results, list) or not all(isinstance(each, BatchingResult) for each in results):
        raise TypeError(f"results must be a list of BatchingResult, as compare returns, got {results!r:.60}")


def table(results: list[BatchingResult]) -> str:
    check_results(results)
    rows = [COLUMNS, *(result.cells() for result in results)]
    name_width, *widths = (max(map(len, column)) + 2 for column in zip(*rows, strict=True))
    lines = [
        name.ljust(name_width) + "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for name, *cells in rows
    ]
    return "\n".join([*lines, "", *NOTES])


class Corpus(Protocol):
    """What a report says about the items, apart from their lengths."""

    unit: str  #: what an item is

    def about(self) -> list[str]:
        """Sentences."""

    def facts(self) -> dict[str, Any]:
        """Plain values, among them the unit."""


@dataclass(frozen=True)
class PaddingReport:
    """The comparison on one corpus, as text or JSON."""

    corpus: Corpus
    lengths: IntArray  #: (items,) int64, number of tokens in each item
    token_kind: str  #: what a token is
    settings: BatchingSettings
    results: list[BatchingResult]

    @property
    def truncated(self) -> int:
        """Number of items that are longer than the token budget."""
        return int((self.lengths > self.settings.max_tokens).sum())

    def as_text(self) -> str:
        return "\n".join([*self.about(), "", table(self.results)])

    def about(self) -> list[str]:
        """The corpus in sentences."""
        return [*self.corpus.about(), self._about_tokens()]

    def _about_tokens(self) -> str:
        unit, max_tokens = self.corpus.unit, self.settings.max_tokens
        truncated = f", {self.truncated:,} {unit}s truncated to {max_tokens:,}" if self.truncated else ""
        return (
            f"Tokens: {self.token_kind}; {self.lengths.mean():.0f} per {unit} on average, "
            f"{int(self.lengths.max()):,} at most{truncated}."
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values: the corpus, the settings, and padding and budget of each way of batching."""
        return {
            "items": len(self.lengths),
            **self.corpus.facts(),
            "token_kind": self.token_kind,
            "longest": int(self.lengths.max()),
            "truncated": self.truncated,
            "settings": asdict(self.settings),
            "batchings": [
                {
                    "name": result.name,
                    "batches": len(result.items),
                    "tokens": int(result.tokens.sum()),
                    "padded_tokens": int(result.padded_tokens.sum()),
                    "padding": result.padding,
                    "budget_used": result.budget_used,
                }
                for result in self.results
            ],
        }
