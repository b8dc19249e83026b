"""Read text files into items, and count the tokens of the items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from tqdm import tqdm

from ...utils.checks import check_choice, check_iterable, needs
from ...utils.progress import standard_error
from ..batch_planning.plan import IntArray, as_lengths
from ..files.compression import COMPRESSIONS, READ_ERRORS, compression_of
from ..files.reader import ChunkError, iter_lines
from ..files.remote import AnyPath, PathLike, check_location, check_named_once, visible_files

UNITS = ("line", "paragraph")
#: Two tokenizers without a vocabulary, and one that is trained on the text. Other names refer to Hugging Face.
TOKENIZERS = ("whitespace", "bytes", "bpe")

_VOCABULARY_SIZE = 50_265  #: vocabulary size of RoBERTa, which the blog post uses
_ITEMS_PER_CALL = 10_000


class TextCorpus:
    """The items of text files: all lines or paragraphs that are not blank.

    In folders, hidden files and files that are not text are skipped. JSON files are read as plain text.

    Args:
        paths: text files, or folders of them, local or at URLs of fsspec. Files may be compressed (.gz or .zst).
        unit: "line" or "paragraph". A paragraph ends at a blank line.

    Raises:
        TypeError: `paths` is not a list of paths.
        ValueError: A path does not exist, a listed file is not UTF-8 text, or there are no items.
    """

    def __init__(self, paths: Iterable[PathLike], unit: str = "line") -> None:
        check_choice("unit", unit, UNITS)
        self.unit = unit
        self.paths = _checked_paths(paths)
        self.files = self.json_files = self.not_text = 0
        self.damaged: list[str] = []  #: reasons why files in folders could not be read
        files = [(path, root.is_dir()) for root in self.paths for path in self._files_of(root)]
        with _progress_bar(files, "read", " files") as bar:
            self.items = [item for path, in_folder in bar for item in self._items_of(path, in_folder)]
        if not self.items:
            damaged = "".join(f"; {problem}" for problem in self.damaged)
            raise ValueError(f"no text found in {', '.join(map(str, self.paths))}{damaged}")

    def about(self) -> list[str]:
        """The corpus in sentences."""
        found = [f"{len(self.items):,} {self.unit}s in {_counted(self.files)}, blank ones not counted."]
        if self.not_text:
            found.append(f"Skipped, not text: {_counted(self.not_text)}.")
        if self.json_files:
            found.append(
                f"{_counted(self.json_files)} of JSON: each line is counted as plain text, JSON syntax included."
            )
        return [*found, *(f"Skipped, damaged: {problem}." for problem in self.damaged)]

    def facts(self) -> dict[str, Any]:
        """The corpus as plain values."""
        names = ("unit", "files", "json_files", "not_text", "damaged")
        return {name: getattr(self, name) for name in names}

    def _files_of(self, root: AnyPath) -> list[AnyPath]:
        if not root.exists():
            raise ValueError(f"no such file or folder: {root}")
        return visible_files(root, self._count_unreachable) if root.is_dir() else [root]

    def _count_unreachable(self, error: OSError) -> None:
        self.damaged.append(f"{error.filename}: cannot be read: {error.strerror}")

    def _items_of(self, path: AnyPath, in_folder: bool) -> Iterator[str]:
        try:
            items = list(self._items_of_file(path))
        except ChunkError as error:
            if not in_folder:
                raise
            self._count_skipped(error)
            return
        self.files += 1
        self.json_files += _is_json(path)
        yield from items

    def _count_skipped(self, error: ChunkError) -> None:
        if isinstance(error.__cause__, READ_ERRORS):
            self.damaged.append(str(error))
        else:
            self.not_text += 1

    def _items_of_file(self, path: AnyPath) -> Iterator[str]:
        paragraph: list[str] = []
        for number, line in iter_lines(path):
            if "\0" in line:
                raise ChunkError(path, number, "not text: it holds a NUL character")
            if self.unit == "line":
                if line.strip():
                    yield line
            elif line.strip():
                paragraph.append(line)
            elif paragraph:
                yield "\n".join(paragraph)
                paragraph = []
        if paragraph:
            yield "\n".join(paragraph)


def _checked_paths(paths: Any) -> list[AnyPath]:
    check_iterable("paths", paths, "a list of files and folders")
    checked = [check_location("each of paths", path) for path in paths]
    if not checked:
        raise ValueError("paths must name at least one file or folder, got none")
    check_named_once("paths", checked, "file or folder")
    return checked


def _counted(files: int) -> str:
    return "1 file" if files == 1 else f"{files:,} files"


def _is_json(path: AnyPath) -> bool:
    return path.name.lower().removesuffix(COMPRESSIONS[compression_of(path)]).endswith((".json", ".jsonl"))


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
        TypeError: `items` are not strings, or `tokenizer` is not a string.
        ValueError: there are no items, or `tokenizer` is unknown.
    """
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise TypeError(f"items must be a list of strings, got {items!r:.60}")
    if not items:
        raise ValueError("items must have at least one string, got none")
    if not isinstance(tokenizer, str):
        raise TypeError(f"tokenizer must be a string, got {type(tokenizer).__name__}")
    if tokenizer == "whitespace":
        return _encoded_lengths(items, lambda part: map(str.split, part)), "words between spaces"
    if tokenizer == "bytes":
        return _encoded_lengths(items, lambda part: map(str.encode, part)), "bytes"
    if tokenizer == "bpe":
        trained = _train_bpe(items)
        token_kind = f"a byte-level BPE of {trained.get_vocab_size():,} entries, trained on this text"
        return _encoded_lengths(items, trained.encode_batch), token_kind
    return _encoded_lengths(items, _load_encoder(tokenizer)), tokenizer


def _encoded_lengths(items: list[str], encode: Callable[[list[str]], Iterable[Any]]) -> IntArray:
    lengths = []
    with _progress_bar(items, "count tokens", " items") as bar:
        for begin in range(0, len(items), _ITEMS_PER_CALL):
            part = items[begin : begin + _ITEMS_PER_CALL]
            lengths.append(as_lengths([len(encoding) for encoding in encode(part)]))
            bar.update(len(part))
    return np.concatenate(lengths)


def _progress_bar(items: list[Any], name: str, unit: str) -> tqdm[Any]:
    """Only on a terminal, and gone when it is done."""
    return tqdm(items, desc=name, unit=unit, unit_scale=True, disable=None, leave=False, file=standard_error())


def _train_bpe(items: list[str]) -> Any:
    with needs("tokenizer 'bpe' needs tokenizers", "tokenizers"):
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_SIZE, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    with _progress_bar(items, "train the BPE", " items") as bar:
        tokenizer.train_from_iterator(bar, trainer)
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
