"""The command `padding`: how much padding different ways of batching cost on the user's text."""

from __future__ import annotations

import argparse
from typing import Any

from .common import Result, add_figure, usage_errors

HELP = "compare the padding of several ways of batching, on your text or data set"
EXAMPLES = """\
examples:
  seqwarm padding --text my_corpus/ --items paragraph --figure padding.png
  seqwarm padding --data train.bin --end-token 50256
  seqwarm padding --data s3://bucket/folder/ --column input_ids
"""

_DATA_OPTIONS = ("end_token", "start_token", "document_ends", "dtype", "index_folder", "column", "length_column")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    items = parser.add_mutually_exclusive_group(required=True).add_argument
    text_help = "UTF-8 text files or folders of them, plain, .gz or .zst; this or --data is required"
    items("--text", nargs="+", metavar="FILE", help=text_help)
    data_help = (
        "a data set whose files know its lengths: files of tokens, prefixes of Megatron's data sets, folders of MDS "
        "shards, Parquet files or a folder of them, or a folder of write_chunks; this or --text is required"
    )
    items("--data", nargs="+", metavar="PATH", help=data_help)
    add("--items", choices=("line", "paragraph"), default="line", help="what an item of a text is")
    tokenizer_help = "whitespace, bytes, bpe (trained on the text), or a name that transformers.AutoTokenizer loads"
    add("--tokenizer", default="whitespace", metavar="NAME", help=tokenizer_help)
    add("--seed", type=int, default=0, metavar="N", help="seed of the order of the items")
    data = parser.add_argument_group("options of the data set's source").add_argument
    data("--end-token", type=int, metavar="N", help="token at the end of documents, required for files of tokens")
    data("--start-token", type=int, metavar="N", help="or the token at the start, required without an end token")
    data("--document-ends", nargs="+", metavar="FILE", help="or a .npy file of ends for each, required without a token")
    data("--dtype", metavar="NAME", help="dtype of a token, default: the header's, else uint16")
    data("--index-folder", metavar="FOLDER", help="folder of the lengths of documents, default: beside each file")
    column_help = "column of MDS shards, default: tokens; of Parquet files, default: the only one"
    data("--column", metavar="NAME", help=column_help)
    data("--length-column", metavar="NAME", help="column of lengths, default: of count_lengths, or of lists of tokens")
    budget = parser.add_argument_group("batches with a token budget").add_argument
    budget("--max-tokens", type=int, default=16_384, metavar="N", help="tokens per batch, with padding")
    budget("--window", type=int, default=10_000, metavar="N", help="items that are sorted by length together")
    fixed = parser.add_argument_group("batches with a fixed number of items").add_argument
    fixed("--batch-size", type=int, default=32, metavar="N", help="items per batch")
    add_figure(parser, "histograms")


def run(arguments: argparse.Namespace) -> Result:
    with usage_errors():
        from ..data import padding

        names = ("batch_size", "max_tokens", "window", "seed")
        settings = {name: getattr(arguments, name) for name in names}
        lengths, token_kind, facts, about = _measured(arguments)
        batchings = padding.compare(lengths, **settings)
    if arguments.figure is not None:
        padding.draw(lengths, batchings, token_kind, arguments.figure)
    unit, longest, truncated = facts["unit"], int(lengths.max()), int((lengths > arguments.max_tokens).sum())
    about += f"\nTokens: {token_kind}; {lengths.mean():.0f} per {unit} on average, {longest:,} at most"
    about += f", {truncated:,} {unit}s truncated to {arguments.max_tokens:,}." if truncated else "."
    facts |= {"items": len(lengths), "token_kind": token_kind, "longest": longest, "truncated": truncated}
    facts |= {"settings": settings, "batchings": [each.to_json() for each in batchings]}
    return Result(facts, f"{about}\n\n{padding.table(batchings)}")


def _measured(arguments: argparse.Namespace) -> tuple[Any, str, dict[str, Any], str]:
    """The lengths of the items, what a token is, and what the items are, as plain values and as a sentence."""
    from ..data import padding

    options = {name: value for name in _DATA_OPTIONS if (value := getattr(arguments, name)) is not None}
    if arguments.data is not None:
        source = padding.open_data_set(arguments.data, **options)
        lengths, name = source.lengths(), type(source).__name__
        if not len(lengths):
            raise ValueError(f"no documents found by {name}")
        facts = {"unit": "document", "source": name}
        return lengths, "as the files tell", facts, f"{len(lengths):,} documents, read by {name}."
    if options:
        raise ValueError(f"{next(iter(options))} needs --data, got --text")
    items, skipped = padding.read_text(arguments.text, arguments.items)
    about = f"{len(items):,} {arguments.items}s, blank ones not counted."
    if skipped:
        about += f"\nSkipped {len(skipped):,} files that are damaged or not text, such as {skipped[0]}"
    return *padding.count_tokens(items, arguments.tokenizer), {"unit": arguments.items, "skipped": skipped}, about
