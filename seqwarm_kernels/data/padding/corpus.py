"""Text files into items, and items into lengths, to see what padding would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...utils.files import PARTIAL_SUFFIX
from ..files.compression import COMPRESSIONS, READ_ERRORS, compression_of
from ..files.reader import ChunkError, iter_lines
from ..planning.plan import IntArray, as_lengths

UNITS = ("line", "paragraph")
#: What needs no vocabulary, and one that is trained on the text; other names are those of Hugging Face.
TOKENIZERS = ("whitespace", "bytes", "bpe")

_VOCABULARY = 50_265  #: of RoBERTa, which the post uses
_AT_A_TIME = 10_000


class Corpus:
    """The items of text files: lines or paragraphs that are not blank. Files in folders that are no text are left out.

    JSON is text as well: its lines are taken as they are.

    Args:
        paths: files, or folders of them; .gz and .zst are read, too.
        unit: "line", or "paragraph": lines up to the next blank one.

    Raises:
        ValueError: a path is not there, a named file is no UTF-8 text, or there are no items.
    """

    def __init__(self, paths: Iterable[str | Path], unit: str = "line") -> None:
        if unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)}, got {unit!r}")
        self.unit = unit
        self.paths = [Path(path) for path in paths]
        self.files = self.json_files = self.left_out = 0
        self.damaged: list[str] = []  #: why files in folders could not be read
        self.items = [item for path in self.paths for item in self._items_below(path)]
        if not self.items:
            damaged = "".join(f"; {problem}" for problem in self.damaged)
            raise ValueError(f"there is no text in {', '.join(map(str, self.paths)) or 'no files'}{damaged}")

    def _items_below(self, root: Path) -> Iterator[str]:
        if not root.exists():
            raise ValueError(f"no such file or folder: {root}")
        for path in _visible_files(root) if root.is_dir() else [root]:
            try:
                items = list(self._items_of(path))
            except ChunkError as error:
                if not root.is_dir():
                    raise
                self._leave_out(error)
                continue
            self.files += 1
            self.json_files += _is_json(path)
            yield from items

    def _leave_out(self, error: ChunkError) -> None:
        if isinstance(error.__cause__, READ_ERRORS):
            self.damaged.append(str(error))
        else:
            self.left_out += 1

    def _items_of(self, path: Path) -> Iterator[str]:
        paragraph: list[str] = []
        for number, line in iter_lines(path):
            if "\0" in line:
                raise ChunkError(path, number, "no text: it holds a NUL character")
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


def _visible_files(root: Path) -> list[Path]:
    paths = (path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix != PARTIAL_SUFFIX)
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(root).parts)]


def _is_json(path: Path) -> bool:
    return path.name.lower().removesuffix(COMPRESSIONS[compression_of(path)]).endswith((".json", ".jsonl"))


def count_tokens(items: list[str], tokenizer: str) -> tuple[IntArray, str]:
    """(items,) int64 tokens, and what counted them in words.

    Args:
        items: text.
        tokenizer: "whitespace", "bytes", "bpe" (byte-level, trained on these items by the package tokenizers), or the
            name or folder of one for `transformers`' AutoTokenizer, with the tokens that it adds.

    Raises:
        ImportError: the package that it needs is missing; says how to install it.
        ValueError: there is no tokenizer of that name.
    """
    if tokenizer == "whitespace":
        return as_lengths([len(item.split()) for item in items]), "words between spaces"
    if tokenizer == "bytes":
        return as_lengths([len(item.encode()) for item in items]), "bytes"
    if tokenizer == "bpe":
        trained = _train(items)
        return _in_parts(items, trained.encode_batch), (
            f"a byte-level BPE of {trained.get_vocab_size():,} entries, trained on this text"
        )
    return _in_parts(items, _load(tokenizer)), tokenizer


def _in_parts(items: list[str], encode: Callable[[list[str]], Iterable[Any]]) -> IntArray:
    parts = [items[begin : begin + _AT_A_TIME] for begin in range(0, len(items), _AT_A_TIME)]
    return np.concatenate([as_lengths([len(encoding) for encoding in encode(part)]) for part in parts])


def _train(items: list[str]) -> Any:
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ImportError("tokenizer 'bpe' needs the package tokenizers: pip install tokenizers") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        items,
        trainers.BpeTrainer(vocab_size=_VOCABULARY, min_frequency=2, initial_alphabet=alphabet, show_progress=False),
    )
    return tokenizer


def _load(name: str) -> Callable[[list[str]], Iterable[Any]]:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(f"tokenizer {name!r} needs the package transformers: pip install transformers") from error
    try:
        loaded = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer must be one of {', '.join(TOKENIZERS)}, or a name that transformers can load, got {name!r}"
        ) from error
    return lambda part: loaded(part).input_ids
