"""The command `padding`: how much padding different ways of batching cost on the user's text."""

from __future__ import annotations

import argparse

from .common import Result, add_figure, check_figure, usage_errors

HELP = "compare the padding of several ways of batching, on your text"
EXAMPLES = """\
examples:
  seqwarm padding --text my_corpus/
  seqwarm padding --text a.txt b.txt.gz --items paragraph --tokenizer bpe
  seqwarm padding --text my_corpus/ --figure padding.png
  seqwarm padding --text my_corpus/ --max-tokens 8192 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text_help = "UTF-8 text files or folders of them, plain, .gz or .zst; JSON is counted as plain text; required"
    add("--text", nargs="+", required=True, metavar="FILE", help=text_help)
    items_help = "what an item is; blank lines are skipped"
    add("--items", choices=("line", "paragraph"), default="line", help=items_help)
    tokenizer_help = "whitespace, bytes, bpe (trained on the text), or a name that transformers.AutoTokenizer loads"
    add("--tokenizer", default="whitespace", metavar="NAME", help=tokenizer_help)
    add("--seed", type=int, default=0, metavar="N", help="seed of the order of the items")
    window_help = "items that are sorted by length together"
    budget = parser.add_argument_group("batches with a token budget").add_argument
    budget("--max-tokens", type=int, default=16_384, metavar="N", help="tokens per batch, with padding")
    budget("--window", type=int, default=10_000, metavar="N", help=window_help)
    fixed = parser.add_argument_group("batches with a fixed number of items").add_argument
    fixed("--batch-size", type=int, default=32, metavar="N", help="items per batch")
    fixed("--short-window", type=int, default=320, metavar="N", help=window_help)
    add_figure(parser, "histograms and the table", page=True)


def run(arguments: argparse.Namespace) -> Result:
    with usage_errors(arguments):
        check_figure(arguments.figure, page=True)
        from ..data.padding import BatchingSettings, PaddingReport, TextCorpus, compare, count_tokens, draw
        from ..data.padding.page import write_page

        names = ("batch_size", "short_window", "max_tokens", "window", "seed")
        settings = BatchingSettings(**{name: getattr(arguments, name) for name in names})
        corpus = TextCorpus(arguments.text, arguments.items)
        lengths, token_kind = count_tokens(corpus.items, arguments.tokenizer)
        report = PaddingReport(corpus, lengths, token_kind, settings, compare(lengths, settings))
    if arguments.figure is not None:
        draw(lengths, report.results, token_kind, arguments.figure)
        write_page(report, arguments.figure, arguments.command_line)
    return Result(report.to_json(), report.as_text())
