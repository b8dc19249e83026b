"""The command: what padding costs on the user's own text."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the rest is imported where it is used, so that --help and info stay quick
    from ..data.padding.comparison import Batching, Settings
    from ..data.padding.corpus import Corpus
    from ..data.planning.plan import IntArray


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text",
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 text files, or folders of them; .gz and .zst, too; lines of JSON are counted as they are",
    )
    parser.add_argument(
        "--items",
        choices=("line", "paragraph"),
        default="line",
        help="what an item is; blank lines are none; default line",
    )
    parser.add_argument(
        "--tokenizer",
        default="whitespace",
        metavar="NAME",
        help="whitespace (default), bytes, bpe (trained on the text), or what transformers' AutoTokenizer loads",
    )
    parser.add_argument("--max-tokens", type=int, default=16_384, help="the budget of a batch; default 16384")
    parser.add_argument("--window", type=int, default=10_000, help="items that are batched together; default 10000")
    parser.add_argument("--batch-size", type=int, default=32, help="items of a batch without a budget; default 32")
    parser.add_argument("--short-window", type=int, default=320, help="items that are sorted together; default 320")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the items; default 0")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw histograms here")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 2 after an error of the user's."""
    from ..data.padding.comparison import Settings, compare
    from ..data.padding.corpus import Corpus
    from ..data.padding.figure import draw
    from ..utils.checks import check_matplotlib

    try:
        if arguments.figure is not None:
            check_matplotlib()
        names = ("batch_size", "short_window", "max_tokens", "window", "seed")
        settings = Settings(**{name: getattr(arguments, name) for name in names})
        corpus = Corpus(arguments.text, arguments.items)
        lengths, counted = _count(corpus, arguments.tokenizer)
        batchings = compare(lengths, settings)
        if arguments.figure is not None:
            draw(lengths, batchings, counted, arguments.figure)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"seqwarm_kernels padding: {error}", file=sys.stderr)
        return 2
    report = as_json if arguments.json else as_text
    _print(report(corpus, lengths, counted, settings, batchings))
    return 0


def _count(corpus: Corpus, tokenizer: str) -> tuple[IntArray, str]:
    from ..data.padding.corpus import count_tokens

    try:
        return count_tokens(corpus.items, tokenizer)
    except (ValueError, ImportError) as error:
        raise ValueError(f"--tokenizer {tokenizer}: {error}") from error


def _print(report: str) -> None:
    try:
        print(report, flush=True)
    except BrokenPipeError:  # of `| head`, which has what it wants; nothing is left to be flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def as_text(corpus: Corpus, lengths: IntArray, counted: str, settings: Settings, batchings: list[Batching]) -> str:
    """The table, with what was counted above it."""
    from ..data.padding.comparison import table

    cut = int((lengths > settings.max_tokens).sum())
    return "\n".join(
        [
            *_about(corpus),
            f"Tokens: {counted}; {lengths.mean():.0f} on average, {int(lengths.max()):,} at most"
            + (f", {cut:,} cut to {settings.max_tokens:,}." if cut else "."),
            "",
            table(batchings),
        ]
    )


def _about(corpus: Corpus) -> Iterator[str]:
    left_out = f"; {_files(corpus.left_out)} left out, since they are no text" if corpus.left_out else ""
    yield f"{len(corpus.items):,} {corpus.unit}s of {_files(corpus.files)}, blank ones not counted{left_out}."
    if corpus.json_files:
        yield f"{_files(corpus.json_files)} of JSON: its lines are counted as they are, not a field of them."
    yield from (f"Damaged and left out: {problem}." for problem in corpus.damaged)


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def as_json(corpus: Corpus, lengths: IntArray, counted: str, settings: Settings, batchings: list[Batching]) -> str:
    rows = [
        {
            "name": each.name,
            "batches": len(each.rows),
            "tokens": int(each.tokens.sum()),
            "padded_tokens": int(each.padded_tokens.sum()),
            "padding": each.padding,
            "budget_used": each.budget_used,
        }
        for each in batchings
    ]
    facts = {"items": len(lengths), "unit": corpus.unit}
    files = {name: getattr(corpus, name) for name in ("files", "json_files", "left_out", "damaged")}
    longest = {"longest": int(lengths.max()), "cut": int((lengths > settings.max_tokens).sum())}
    return json.dumps({**facts, **files, "lengths": counted, **longest, "batchings": rows}, indent=2)
