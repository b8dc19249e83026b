"""The command: what padding costs on the user's own text."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the rest is imported where it is used, so that --help and info stay quick
    from .corpus import Corpus
    from .padding import Batching, Settings
    from .plan import IntArray


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text",
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 text files, or folders of them; .gz and .zst, too",
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
    from .corpus import Corpus, count_tokens
    from .padding import Settings, compare
    from .padding_figure import check_matplotlib, draw

    try:
        if arguments.figure is not None:
            check_matplotlib()
        names = ("batch_size", "short_window", "max_tokens", "window", "seed")
        settings = Settings(**{name: getattr(arguments, name) for name in names})
        corpus = Corpus(arguments.text, arguments.items)
        lengths, counted = count_tokens(corpus.items, arguments.tokenizer)
        batchings = compare(lengths, settings)
        if arguments.figure is not None:
            draw(lengths, batchings, counted, arguments.figure)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"seqwarm_kernels padding: {error}", file=sys.stderr)
        return 2
    report = as_json if arguments.json else as_text
    print(report(corpus, lengths, counted, settings, batchings))
    return 0


def as_text(corpus: Corpus, lengths: IntArray, counted: str, settings: Settings, batchings: list[Batching]) -> str:
    """The table, with what was counted above it."""
    from .padding import table

    cut = int((lengths > settings.max_tokens).sum())
    left_out = f"; {_files(corpus.left_out)} left out, since they are no text" if corpus.left_out else ""
    return "\n".join(
        [
            f"{len(lengths):,} {corpus.unit}s of {_files(corpus.files)}, blank ones not counted{left_out}.",
            f"Tokens: {counted}; {lengths.mean():.0f} on average, {int(lengths.max()):,} at most"
            + (f", {cut:,} cut to {settings.max_tokens:,}." if cut else "."),
            "",
            table(batchings),
        ]
    )


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
    facts = {"items": len(lengths), "unit": corpus.unit, "files": corpus.files, "left_out": corpus.left_out}
    longest = {"longest": int(lengths.max()), "cut": int((lengths > settings.max_tokens).sum())}
    return json.dumps({**facts, "lengths": counted, **longest, "batchings": rows}, indent=2)
