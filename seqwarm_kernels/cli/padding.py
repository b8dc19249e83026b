"""The command `padding`: compare how much padding different ways of batching cost on the user's text."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text",
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 text files or folders of them, plain, .gz or .zst; JSON is counted as plain text",
    )
    parser.add_argument(
        "--items",
        choices=("line", "paragraph"),
        default="line",
        help="what an item is; blank lines are skipped; default line",
    )
    parser.add_argument(
        "--tokenizer",
        default="whitespace",
        metavar="NAME",
        help="whitespace (default), bytes, bpe (trained on the text), or a name that transformers.AutoTokenizer loads",
    )
    budget = parser.add_argument_group("batches with a token budget")
    budget.add_argument(
        "--max-tokens", type=int, default=16_384, metavar="N", help="tokens per batch, with padding; default 16384"
    )
    budget.add_argument(
        "--window", type=int, default=10_000, metavar="N", help="items that are sorted together; default 10000"
    )
    fixed = parser.add_argument_group("batches with a fixed number of items")
    fixed.add_argument("--batch-size", type=int, default=32, metavar="N", help="items per batch; default 32")
    fixed.add_argument(
        "--short-window", type=int, default=320, metavar="N", help="items that are sorted together; default 320"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the order of the items; default 0")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="write histograms and the table to this file")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return 0, or 2 after an error in the arguments or the text."""
    # Imported here so that --help and other commands start quickly.
    from ..data.padding import BatchingSettings, PaddingReport, TextCorpus, compare, count_tokens, draw
    from ..utils.checks import check_matplotlib

    try:
        if arguments.figure is not None:
            check_matplotlib()
        names = ("batch_size", "short_window", "max_tokens", "window", "seed")
        settings = BatchingSettings(**{name: getattr(arguments, name) for name in names})
        corpus = TextCorpus(arguments.text, arguments.items)
        lengths, token_kind = count_tokens(corpus.items, arguments.tokenizer)
        results = compare(lengths, settings)
        if arguments.figure is not None:
            draw(lengths, results, token_kind, arguments.figure)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"seqwarm_kernels padding: {error}", file=sys.stderr)
        return 2
    report = PaddingReport(corpus, lengths, token_kind, settings, results)
    try:
        print(report.as_json() if arguments.json else report.as_text(), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe: nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
