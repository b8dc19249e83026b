"""How much padding five ways of batching cost: three of a 2020 blog post on dynamic batching, two of `BatchPlanner`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from ..utils.checks import needs
from ..utils.figures import ACCENT, PLAIN_NUMBERS, QUIET, ink, new_figure, write_figure
from ..utils.progress import standard_error
from . import (
    BatchPlanner,
    ChunkError,
    ChunkSource,
    LengthBatchSampler,
    MDSSource,
    MegatronSource,
    ParquetSource,
    TokenSource,
    visible_files,
)
from .batch_planning.padded import greedy_boundaries
from .batch_planning.plan import IntArray
from .files.manifest import MANIFEST, Manifest
from .files.mds import INDEX
from .files.parquet import LENGTH_COLUMN, SUFFIX
from .files.reader import iter_lines
from .files.remote import AnyPath, PathLike
from .sources.base import check_locations

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What an item of a text is. A paragraph ends at a blank line.
UNITS = ("line", "paragraph")
#: Two tokenizers without a vocabulary, and one that is trained on the text. Other names refer to Hugging Face.
TOKENIZERS = ("whitespace", "bytes", "bpe")

_VOCABULARY_SIZE = 50_265  #: of RoBERTa, which the blog post uses
_ITEMS_PER_CALL = 10_000
_BINS = 40


def read_text(paths: PathLike | Iterable[PathLike], unit: str = "line") -> tuple[list[str], list[str]]:
    """Read the lines or paragraphs of UTF-8 text files, or folders of them, that are not blank.

    Returns:
        The items, and why files in folders were skipped: they are damaged or not text.
    """
    items: list[str] = []
    skipped: list[str] = []
    roots = check_locations("paths", paths, "text files, or folders of them")
    for root in roots:
        if not root.is_dir():
            items += _items_of_file(root, unit)
            continue
        for path in visible_files(root, lambda error: skipped.append(f"{error.filename}: {error.strerror}")):
            try:
                items += _items_of_file(path, unit)
            except ChunkError as error:
                skipped.append(str(error))
    if not items:
        raise ValueError("; ".join([f"no text found in {', '.join(map(str, roots))}", *skipped]))
    return items, skipped


def _items_of_file(path: AnyPath, unit: str) -> list[str]:
    lines = []
    for number, line in iter_lines(path):
        if "\0" in line:
            raise ChunkError(path, number, "not text: it holds a NUL character")
        lines.append(line)
    if unit == "line":
        return [line for line in lines if line.strip()]
    groups = groupby(lines, key=lambda line: bool(line.strip()))
    return ["\n".join(paragraph) for has_text, paragraph in groups if has_text]


def count_tokens(items: list[str], tokenizer: str) -> tuple[IntArray, str]:
    """Count the tokens of each text.

    Args:
        items: The texts.
        tokenizer: One of `TOKENIZERS`, or what `transformers.AutoTokenizer` loads. Special tokens are counted.

    Returns:
        The number of tokens in each item, (items,) int64, and a description of a token.
    """
    encode, token_kind = _encoder(items, tokenizer)
    lengths: list[int] = []
    show: dict[str, Any] = {"disable": None, "leave": False, "file": standard_error()}  # on a terminal, then gone
    for begin in tqdm(range(0, len(items), _ITEMS_PER_CALL), "count tokens", **show):
        lengths += map(len, encode(items[begin : begin + _ITEMS_PER_CALL]))
    return np.array(lengths, np.int64), token_kind


def _encoder(items: list[str], tokenizer: str) -> tuple[Callable[[list[str]], Iterable[Any]], str]:
    if tokenizer == "whitespace":
        return lambda part: map(str.split, part), "words between spaces"
    if tokenizer == "bytes":
        return lambda part: map(str.encode, part), "bytes"
    if tokenizer == "bpe":
        with needs("tokenizer 'bpe' needs tokenizers", "tokenizers"):
            from tokenizers import ByteLevelBPETokenizer
        trained: Any = ByteLevelBPETokenizer()
        trained.train_from_iterator(items, _VOCABULARY_SIZE, length=len(items))
        return trained.encode_batch, f"a byte-level BPE of {trained.get_vocab_size():,} entries, trained on this text"
    with needs(f"tokenizer {tokenizer!r} needs transformers", "transformers"):
        from transformers import AutoTokenizer
    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        known = ", ".join(TOKENIZERS)
        raise ValueError(f"tokenizer must be {known} or a name that transformers loads, got {tokenizer!r}") from error
    return lambda part: loaded(part).input_ids, tokenizer


def open_data_set(paths: PathLike | Iterable[PathLike], **options: Any) -> Any:
    """Open the source, with these options, that reads what is at the first path: its files hold all lengths."""
    paths = check_locations("paths", paths, "the files or folders of a data set")
    first = paths[0]
    if isinstance(options.get("column"), str):
        options["column"] = [options["column"]]  # only lengths are read, so labels beside it do not matter
    if (first / MANIFEST).exists():
        manifest = Manifest.read(first)
        if manifest.format != "parquet":
            return ChunkSource(paths, **options)
        if manifest.length_fn is not None:
            options.setdefault("length_column", LENGTH_COLUMN)
        return ParquetSource(paths, **options)
    if (first / INDEX).exists():
        return MDSSource(paths, **options)
    if first.is_dir() or first.name.lower().endswith(SUFFIX):
        return ParquetSource(paths, **options)
    if first.with_name(f"{first.name.removesuffix('.bin').removesuffix('.idx')}.idx").exists():
        return MegatronSource(paths, **options)
    if not first.exists():
        raise ValueError(f"no such file or folder: {first}")
    return TokenSource(paths, **options)


@dataclass(frozen=True)
class Batching:
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
        return None if self.max_tokens is None else float(self.tokens.mean()) / self.max_tokens

    def to_json(self) -> dict[str, Any]:
        totals = {"tokens": int(self.tokens.sum()), "padded_tokens": int(self.padded_tokens.sum())}
        shares = {"padding": self.padding, "budget_used": self.budget_used}
        return {"name": self.name, "batches": len(self.items), **totals, **shares}


def compare(
    lengths: IntArray,
    *,
    batch_size: int = 32,
    short_window: int = 320,
    max_tokens: int = 16_384,
    window: int = 10_000,
    seed: int = 0,
) -> list[Batching]:
    """Batch the same items in the same random order in five ways.

    Args:
        lengths: (items,) int64, number of tokens in each item. Items longer than the budget are truncated to it.
        batch_size: Items per batch, for the two ways without a token budget.
        short_window: Items that are sorted together, for batches of `batch_size`.
        max_tokens: Token budget of a batch, padding included, for the other three ways.
        window: Items that are sorted together, for the other three ways.
        seed: Determines the order of the items.
    """
    lengths = np.minimum(lengths, max_tokens)
    rows, budget = BatchPlanner(batch_size=batch_size), f"budget {max_tokens:,}, window {window:,}"
    ways = [
        (f"random batches of {batch_size}", rows, batch_size),
        (f"window of {short_window}, batches of {batch_size}", rows, short_window),
        (f"{budget}, greedy", _GreedyPlanner(max_tokens), window),
        (f"{budget}, BatchPlanner", BatchPlanner(max_tokens), window),
        (f"{budget}, packed", BatchPlanner(max_tokens, packed=True), window),
    ]
    return [_sampled(*way, lengths, seed) for way in ways]


class _GreedyPlanner(BatchPlanner):
    """Fills batch after batch of the sorted window up to the token budget, as infinibatch does."""

    def _group(self, lengths: IntArray) -> tuple[IntArray, IntArray]:
        order = np.argsort(-lengths, kind="stable")
        return order, np.asarray(greedy_boundaries(self.widths(lengths[order]), self.max_tokens, None))


def _sampled(name: str, planner: BatchPlanner, window: int, lengths: IntArray, seed: int) -> Batching:
    """One epoch of a `LengthBatchSampler`."""
    batches = list(LengthBatchSampler(lengths, planner, window=window, seed=seed, rank=0, world_size=1))
    items = np.array([len(batch) for batch in batches])
    begins, batched_lengths = np.cumsum(items) - items, lengths[np.concatenate(batches)]
    tokens = np.add.reduceat(batched_lengths, begins)
    padded_tokens = tokens if planner.packed else items * planner.widths(np.maximum.reduceat(batched_lengths, begins))
    return Batching(name, items, tokens, padded_tokens, planner.max_tokens)


def table(batchings: list[Batching]) -> str:
    """A line for each way. Words of it are explained in the guide "Batches by length"."""
    rows = [("batching", "batches", "items per batch", "tokens per batch", "padding", "budget used")]
    for each in batchings:
        items = f"{each.items.min():,} to {each.items.max():,}"
        used = "" if each.budget_used is None else f"{each.budget_used:.1%}"
        sizes = (f"{len(each.items):,}", items, f"{each.tokens.mean():,.0f}")
        rows.append((each.name, *sizes, f"{each.padding:.1%}", used))
    first, *widths = (max(map(len, column)) + 2 for column in zip(*rows, strict=True))
    aligned = ([name.ljust(first), *map(str.rjust, cells, widths)] for name, *cells in rows)
    return "\n".join(map("".join, aligned))


def draw(lengths: IntArray, batchings: list[Batching], token_kind: str, path: str | Path) -> None:
    """Draw the comparison as a PNG. Needs matplotlib. `token_kind` says what a token is."""
    shown = histograms(lengths, batchings, token_kind)
    write_figure(functools.partial(padding_figure, shown), Path(path))


def histograms(lengths: IntArray, batchings: list[Batching], token_kind: str) -> dict[str, Any]:
    """All that the figure shows, as plain values: they can be written as JSON and drawn later."""
    length_edges = np.unique(np.geomspace(1, max(2, int(lengths.max()) + 1), _BINS + 10).astype(int))
    sizes = np.concatenate([each.padded_tokens for each in batchings])
    smallest, largest = np.quantile(sizes, (0.005, 0.995)).astype(int)
    size_edges = np.geomspace(max(1, smallest), 1.1 * largest + 1, _BINS + 1)
    ways = []
    for each in batchings:
        padding = _histogram(1 - each.tokens / np.maximum(each.padded_tokens, 1), np.linspace(0, 1, _BINS + 1))
        tokens = _histogram(each.padded_tokens, size_edges)
        drawn = {"max_tokens": each.max_tokens, "padding_of_a_batch": padding, "tokens_of_a_batch": tokens}
        ways.append({**each.to_json(), **drawn})
    items = {"items": len(lengths), "tokens": int(lengths.sum()), "token_kind": token_kind}
    return {**items, "lengths": _histogram(np.maximum(lengths, 1), length_edges), "ways": ways}


def _histogram(values: np.ndarray, edges: np.ndarray) -> dict[str, list[Any]]:
    """Values outside of the edges count in the first or the last bin."""
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def padding_figure(shown: dict[str, Any]) -> Figure:
    """Draw what `histograms` returns: a row for each way of batching, so that no histogram hides another."""
    rows = len(shown["ways"])
    figure = new_figure(11, 2.2 + 1.1 * rows)
    grid = figure.add_gridspec(2, 1, height_ratios=(2, 1.1 * rows))
    top, below = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    axes = top.subplots()
    axes.stairs(shown["lengths"]["counts"], shown["lengths"]["edges"], color=QUIET, fill=True)
    axes.set(xlabel=f"tokens of an item ({shown['token_kind']})", ylabel="items")
    axes.set_title(f"{shown['items']:,} items, {shown['tokens']:,} tokens")
    axes.set_xscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PLAIN_NUMBERS)
    panels = below.subplots(rows, 2, sharex="col", squeeze=False)
    for way, (left, right) in zip(shown["ways"], panels, strict=True):
        for axes, values in ((left, way["padding_of_a_batch"]), (right, way["tokens_of_a_batch"])):
            shares = np.asarray(values["counts"]) / way["batches"]  # the numbers of batches differ
            axes.stairs(shares, values["edges"], color=ACCENT, fill=True)
            axes.set_ylim(0, 1.05)
            axes.set_yticks([0, 1], ["0", "all"])
        used = "" if way["budget_used"] is None else f", {way['budget_used']:.1%} of the budget used"
        left.set_title(way["name"])
        right.set_title(f"{way['batches']:,} batches, {way['padding']:.1%} padding{used}")
        if way["max_tokens"] is not None:
            right.axvline(way["max_tokens"], color=ink(), linestyle=(0, (4, 3)), linewidth=1)
    left.set(xlabel="padding of a batch", xlim=(0, 1))
    left.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.set_xlabel("tokens of a batch, padding included; dashed: the budget")
    right.set_xscale("log")
    right.xaxis.set_major_formatter(PLAIN_NUMBERS)
    below.supylabel("share of the batches", fontsize=10)
    return figure
