"""The command `padding`: how much padding different ways of batching cost on the user's text."""

from __future__ import annotations

import argparse
from typing import Any

from .common import Result, add_figure, check_figure, usage_errors

HELP = "compare the padding of several ways of batching, on your text or data set"
EXAMPLES = """\
examples:
  seqwarm padding --text my_corpus/
  seqwarm padding --text a.txt b.txt.gz --items paragraph --tokenizer bpe
  seqwarm padding --text my_corpus/ --figure padding.png
  seqwarm padding --text my_corpus/ --max-tokens 8192 --json
  seqwarm padding --data train.bin --end-token 50256
  seqwarm padding --data my_mds_folder/ --column tokens
  seqwarm padding --data s3://bucket/folder/ --column input_ids
"""

_DATA_OPTIONS = ("end_token", "start_token", "document_ends", "dtype", "index_folder", "column", "length_column")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    items = parser.add_mutually_exclusive_group(required=True).add_argument
    text_help = (
        "UTF-8 text files or folders of them, plain, .gz or .zst; JSON is counted as plain text; this or --data is "
        "required"
    )
    items("--text", nargs="+", metavar="FILE", help=text_help)
    data_help = (
        "a data set whose files know its lengths: files of tokens, prefixes of Megatron's data sets, folders of MDS "
        "shards, Parquet files or a folder of them, or a folder of write_chunks; this or --text is required"
    )
    items("--data", nargs="+", metavar="PATH", help=data_help)
    items_help = "what an item is; blank lines are skipped"
    add("--items", choices=("line", "paragraph"), default="line", help=items_help)
    tokenizer_help = "whitespace, bytes, bpe (trained on the text), or a name that transformers.AutoTokenizer loads"
    add("--tokenizer", default="whitespace", metavar="NAME", help=tokenizer_help)
    add("--seed", type=int, default=0, metavar="N", help="seed of the order of the items")
    window_help = "items that are sorted by length together"
    data = parser.add_argument_group("data sets").add_argument
    separator_help = "of each document; required for files of tokens, or another way to find documents"
    data("--end-token", type=int, metavar="N", help=f"token at the end {separator_help}")
    data("--start-token", type=int, metavar="N", help=f"token at the start {separator_help}")
    ends_help = "a .npy file of the ends of documents for each file of tokens, required without such a token"
    data("--document-ends", nargs="+", metavar="FILE", help=ends_help)
    dtype_help = "dtype of a token; columns of bytes require it; default for files of tokens: the header's, else uint16"
    data("--dtype", metavar="NAME", help=dtype_help)
    index_help = "where the places of documents are kept, default: beside each file of tokens"
    data("--index-folder", metavar="FOLDER", help=index_help)
    column_help = "column of MDS shards (default: tokens) or of Parquet files (default: the only one)"
    data("--column", metavar="NAME", help=column_help)
    length_help = "column of lengths in Parquet files, default: the lengths of count_lengths, or of lists of tokens"
    data("--length-column", metavar="NAME", help=length_help)
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
        from ..data.padding import BatchingSettings, PaddingReport, compare, draw
        from ..data.padding.page import write_page

        names = ("batch_size", "short_window", "max_tokens", "window", "seed")
        settings = BatchingSettings(**{name: getattr(arguments, name) for name in names})
        corpus, lengths, token_kind = _measured(arguments)
        report = PaddingReport(corpus, lengths, token_kind, settings, compare(lengths, settings))
    if arguments.figure is not None:
        draw(lengths, report.results, token_kind, arguments.figure)
        write_page(report, arguments.figure, arguments.command_line)
    return Result(report.to_json(), report.as_text())


def _measured(arguments: argparse.Namespace) -> tuple[Any, Any, str]:
    """The corpus or data set, the lengths of its items, and what a token is."""
    from ..data.padding import DataSet, TextCorpus, count_tokens

    options = {name: getattr(arguments, name) for name in _DATA_OPTIONS}
    if arguments.data is not None:
        data_set = DataSet(arguments.data, options)
        return data_set, data_set.lengths, data_set.token_kind
    given = next((name for name, value in options.items() if value is not None), None)
    if given is not None:
        raise ValueError(f"{given} needs --data, got --text")
    corpus = TextCorpus(arguments.text, arguments.items)
    return corpus, *count_tokens(corpus.items, arguments.tokenizer)
