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
from ..utils.figures import QUIET, ink, log_axis, look_of, new_figure, plain_numbers, write_figure
from ..utils.progress import standard_error
from .batch_planning.padded import greedy_boundaries
from .batch_planning.plan import IntArray
from .batch_planning.planner import BatchPlanner
from .files.manifest import MANIFEST, Manifest
from .files.mds import INDEX
from .files.parquet import LENGTH_COLUMN
from .files.parquet import SUFFIX as PARQUET_SUFFIX
from .files.reader import ChunkError, iter_lines
from .files.remote import AnyPath, PathLike, visible_files
from .samplers.sampler import LengthBatchSampler
from .sources.base import check_locations
from .sources.chunk_source import ChunkSource
from .sources.mds_source import MDSSource
from .sources.megatron_source import MegatronSource
from .sources.parquet_source import ParquetSource
from .sources.permutation import permuted
from .sources.token_source import TokenSource

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What an item of a text is. A paragraph ends at a blank line.
UNITS = ("line", "paragraph")
#: Two tokenizers without a vocabulary, and one that is trained on the text. Other names refer to Hugging Face.
TOKENIZERS = ("whitespace", "bytes", "bpe")
#: The ways of `compare` in order, as named in `LOOKS`.
WAYS = ("random", "short window", "greedy (infinibatch)", "BatchPlanner", "BatchPlanner, packed")
#: What the words of the table mean.
NOTES = (
    "window: number of items that are sorted by length together.",
    "budget: most tokens that a batch may have, padding included.",
    "greedy: the longest items first, batch after batch filled up to the budget, as the library infinibatch does.",
    "BatchPlanner: as many batches as greedy, with boundaries that cost less padding.",
    "packed: items one after another in one row, without padding.",
    "tokens per batch: average, without padding.",
)

_VOCABULARY_SIZE = 50_265  #: vocabulary size of RoBERTa, which the blog post uses
_ITEMS_PER_CALL = 10_000
_BINS = 40
_POWERS_OF_TEN = [10.0**power for power in range(10)]


# ---- the lengths of items


def read_text(paths: PathLike | Iterable[PathLike], unit: str = "line") -> tuple[list[str], list[str]]:
    """Read the lines or paragraphs of text files that are not blank.

    Args:
        paths: text files, or folders of them, local or at URLs of fsspec. Files may be compressed (.gz or .zst). Hidden
            files in folders are left out. JSON is read as plain text.
        unit: "line" or "paragraph".

    Returns:
        The items, and why files in folders were skipped: they are damaged or not text.

    Raises:
        ValueError: a path does not exist, a listed file is not UTF-8 text, or there are no items.
    """
    items: list[str] = []
    skipped: list[str] = []
    roots = check_locations("paths", paths, "text files, or folders of them")
    for root in roots:
        if not root.exists():
            raise ValueError(f"no such file or folder: {root}")
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
    """Count the tokens of each item.

    Args:
        items: the texts.
        tokenizer: "whitespace", "bytes", "bpe" (byte-level, trained on these items by the package tokenizers), or a
            name or folder that `transformers.AutoTokenizer` loads. Special tokens that it adds are counted.

    Returns:
        The number of tokens in each item, (items,) int64, and a description of a token.

    Raises:
        ImportError: A required package is missing. The message says how to install it.
        ValueError: `tokenizer` is unknown.
    """
    encode: Callable[[list[str]], Iterable[Any]]
    if tokenizer == "whitespace":
        encode, token_kind = lambda part: map(str.split, part), "words between spaces"
    elif tokenizer == "bytes":
        encode, token_kind = lambda part: map(str.encode, part), "bytes"
    elif tokenizer == "bpe":
        trained = _train_bpe(items)
        encode = trained.encode_batch
        token_kind = f"a byte-level BPE of {trained.get_vocab_size():,} entries, trained on this text"
    else:
        encode, token_kind = _load_encoder(tokenizer), tokenizer
    lengths: list[int] = []
    show = {"disable": None, "leave": False, "file": standard_error()}  # on a terminal, and gone when it is done
    with tqdm(items, "count tokens", unit=" items", unit_scale=True, **show) as bar:
        for begin in range(0, len(items), _ITEMS_PER_CALL):
            part = items[begin : begin + _ITEMS_PER_CALL]
            lengths += map(len, encode(part))
            bar.update(len(part))
    return np.array(lengths, np.int64), token_kind


def _train_bpe(items: list[str]) -> Any:
    with needs("tokenizer 'bpe' needs tokenizers", "tokenizers"):
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY_SIZE, min_frequency=2, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(items, trainer, len(items))
    return tokenizer


def _load_encoder(name: str) -> Callable[[list[str]], Iterable[Any]]:
    with needs(f"tokenizer {name!r} needs transformers", "transformers"):
        from transformers import AutoTokenizer
    try:
        loaded = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer must be one of {', '.join(TOKENIZERS)}, or a name that transformers can load, got {name!r}"
        ) from error
    return lambda part: loaded(part).input_ids


def open_data_set(paths: PathLike | Iterable[PathLike], **options: Any) -> Any:
    """Open the source that reads what lies at the first path: its files tell the lengths of all items.

    Args:
        paths: a folder of `write_chunks` with lengths, folders of MDS shards, data sets of Megatron without or with
            their suffix, Parquet files or a folder of them, or files for `TokenSource`.
        options: keyword arguments of the source.

    Raises:
        ValueError: a file is missing or damaged, or an option is missing or invalid.
        TypeError: the source does not have an option.
        ImportError: a package is missing that reads the files.
    """
    locations = check_locations("paths", paths, "the files or folders of a data set")
    first = locations[0]
    if isinstance(options.get("column"), str):
        options["column"] = [options["column"]]  # only lengths are read, so labels beside it do not matter
    if first.is_dir():
        if (first / MANIFEST).exists():
            manifest = Manifest.read(first)
            if manifest.format != "parquet":
                return ChunkSource(locations, **options)
            if manifest.length_fn is not None:
                options = {"length_column": LENGTH_COLUMN, **options}
        elif (first / INDEX).exists():
            return MDSSource(locations, **options)
        return ParquetSource(locations, **options)
    if first.name.lower().endswith(PARQUET_SUFFIX):
        return ParquetSource(locations, **options)
    name = first.name.removesuffix(".bin").removesuffix(".idx")
    if first.with_name(f"{name}.idx").exists():
        return MegatronSource(locations, **options)
    if not first.exists():
        raise ValueError(f"no such file or folder: {first}")
    return TokenSource(locations, **options)


# ---- five ways of batching


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
        return {
            "name": self.name,
            "batches": len(self.items),
            "tokens": int(self.tokens.sum()),
            "padded_tokens": int(self.padded_tokens.sum()),
            "padding": self.padding,
            "budget_used": self.budget_used,
        }


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
        lengths: (items,) int64, number of tokens in each item. Items longer than the token budget are truncated to it.
        batch_size: items per batch, for the two ways without a token budget.
        short_window: items that are sorted together, for batches of `batch_size`.
        max_tokens: token budget of a batch, padding included, for the other three ways.
        window: items that are sorted together, for the other three ways.
        seed: determines the order of the items.
    """
    budgeted, packed = BatchPlanner(max_tokens), BatchPlanner(max_tokens, packed=True)
    rows = BatchPlanner(batch_size=batch_size)
    lengths = np.minimum(lengths, max_tokens)
    budget = f"budget {max_tokens:,}, window {window:,}"
    ours = _sampled(f"{budget}, BatchPlanner", budgeted, lengths, window, seed)
    return [
        _sampled(f"random batches of {batch_size}", rows, lengths, batch_size, seed),
        _sampled(f"window of {short_window}, batches of {batch_size}", rows, lengths, short_window, seed),
        _greedy(f"{budget}, greedy", max_tokens, lengths, window, seed),
        ours,
        _sampled(f"{budget}, packed", packed, lengths, window, seed),
    ]


def _sampled(name: str, planner: BatchPlanner, lengths: IntArray, window: int, seed: int) -> Batching:
    """One epoch of a `LengthBatchSampler`."""
    batches = list(LengthBatchSampler(lengths, planner, window=window, seed=seed, rank=0, world_size=1))
    items = np.array([len(batch) for batch in batches])
    begins, batched_lengths = np.cumsum(items) - items, lengths[np.concatenate(batches)]
    tokens = np.add.reduceat(batched_lengths, begins)
    padded_tokens = tokens if planner.packed else items * planner.widths(np.maximum.reduceat(batched_lengths, begins))
    return Batching(name, items, tokens, padded_tokens, planner.max_tokens)


def _greedy(name: str, max_tokens: int, lengths: IntArray, window: int, seed: int) -> Batching:
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
    return Batching(name, items, tokens, padded_tokens, max_tokens)


def table(batchings: list[Batching]) -> str:
    rows = [("batching", "batches", "items per batch", "tokens per batch", "padding", "budget used")]
    for each in batchings:
        fewest, most = int(each.items.min()), int(each.items.max())
        rows.append(
            (
                each.name,
                f"{len(each.items):,}",
                f"{fewest:,} to {most:,}" if fewest < most else f"{most:,}",
                f"{each.tokens.mean():,.0f}",
                f"{each.padding:.1%}",
                "" if each.budget_used is None else f"{each.budget_used:.1%}",
            )
        )
    name_width, *widths = (max(map(len, column)) + 2 for column in zip(*rows, strict=True))
    lines = [
        name.ljust(name_width) + "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for name, *cells in rows
    ]
    return "\n".join([*lines, "", *NOTES])


# ---- the figure


def draw(lengths: IntArray, batchings: list[Batching], token_kind: str, path: str | Path) -> None:
    """Draw the comparison as a PNG. Needs matplotlib.

    Args:
        lengths: (items,) int64, number of tokens in each item.
        batchings: returned by `compare`.
        token_kind: what a token is, for the title.
        path: the PNG to write.
    """
    shown = histograms(lengths, batchings, token_kind)
    write_figure(functools.partial(padding_figure, shown), Path(path))


def histograms(lengths: IntArray, batchings: list[Batching], token_kind: str) -> dict[str, Any]:
    """All that the figure shows, as plain values: they can be written as JSON and drawn later."""
    length_edges = np.unique(np.geomspace(1, max(2, int(lengths.max()) + 1), _BINS + 10).astype(int))
    sizes = np.concatenate([each.padded_tokens for each in batchings])
    smallest, largest = np.quantile(sizes, (0.005, 0.995)).astype(int)
    size_edges = np.geomspace(max(1, smallest), 1.1 * largest + 1, _BINS + 1)
    share_edges = np.linspace(0, 1, _BINS + 1)
    ways = [
        {
            **each.to_json(),
            "max_tokens": each.max_tokens,
            "padding_of_a_batch": _histogram(1 - each.tokens / np.maximum(each.padded_tokens, 1), share_edges),
            "tokens_of_a_batch": _histogram(each.padded_tokens, size_edges),
        }
        for each in batchings
    ]
    shown = {"items": len(lengths), "tokens": int(lengths.sum()), "token_kind": token_kind}
    return {**shown, "lengths": _histogram(np.maximum(lengths, 1), length_edges), "ways": ways}


def _histogram(values: np.ndarray, edges: np.ndarray) -> dict[str, list[Any]]:
    """Values outside of the edges count in the first or the last bin."""
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def padding_figure(shown: dict[str, Any]) -> Figure:
    """Draw what `histograms` returns: a row for each way of batching, so that no histogram hides another."""
    ways = shown["ways"]
    figure = new_figure(11, 2.2 + 1.1 * len(ways))
    grid = figure.add_gridspec(2, 1, height_ratios=(2, 1.1 * len(ways)))
    top, below = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    _draw_lengths(top.subplots(), shown)
    panels = below.subplots(len(ways), 2, sharex="col", squeeze=False)
    for index, (way, (left, right)) in enumerate(zip(ways, panels, strict=True)):
        for axes, name in ((left, "padding_of_a_batch"), (right, "tokens_of_a_batch")):
            shares = np.asarray(way[name]["counts"]) / way["batches"]  # the numbers of batches differ
            axes.stairs(shares, way[name]["edges"], color=look_of(WAYS[index]).color, fill=True)
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
    log_axis(right.xaxis, _POWERS_OF_TEN)
    below.supylabel("share of the batches", fontsize=10)
    return figure


def _draw_lengths(axes: Axes, shown: dict[str, Any]) -> None:
    axes.stairs(shown["lengths"]["counts"], shown["lengths"]["edges"], color=QUIET, fill=True)
    axes.set(xlabel=f"tokens of an item ({shown['token_kind']})", ylabel="items")
    axes.set_title(f"{shown['items']:,} items, {shown['tokens']:,} tokens")
    log_axis(axes.xaxis, _POWERS_OF_TEN)
    plain_numbers(axes.yaxis)
