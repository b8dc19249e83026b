"""Zero-shot prediction of the last word of held-out paragraphs, as in LAMBADA.

D. Paperno et al., "The LAMBADA dataset", arXiv 1606.06031. A word counts as predicted if the model's first choice is
right at each of its tokens, given the tokens before. Radford et al. do the same for GPT-2.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqwarm_kernels.utils.files import write_atomically

from .running import load_script

SCORES = "last_words.json"  #: in a run's folder
FEWEST_WORDS = 20  #: of a paragraph
FEWEST_LETTERS = 3  #: of its last word; shorter words say little

#: The end of a paragraph of prose: text, one word, a full stop.
_LAST_WORD = re.compile(rf"^(.*[\w,;:)`*'\"]) ([A-Za-z]{{{FEWEST_LETTERS},}})\.$", re.DOTALL)

_DOCUMENTS_AT_ONCE = 64


@dataclass(frozen=True)
class Item:
    context: str
    word: str  #: with the space before it


@dataclass(frozen=True)
class Scores:
    """The scores of one model, with one entry for each item."""

    right: list[bool]
    nats: list[float]  #: cross-entropy of the whole last word

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def perplexity(self) -> float:
        """Perplexity of the whole last word."""
        return math.exp(sum(self.nats) / len(self.nats))


def ignore() -> None:
    pass


def read_scores(folder: Path) -> Scores | None:
    """The scores that `score_run` wrote, or None."""
    path = folder / SCORES
    return Scores(**json.loads(path.read_text())) if path.exists() else None


def score_run(folder: Path, cache: Path, most: int, device: str, check: Callable[[], None] = ignore) -> None:
    """Score a finished run on its held-out text, and keep the scores in its folder.

    Args:
        folder: Folder of the run.
        cache: The script's folder of tokens.
        most: Largest number of items.
        device: Device to score on.
        check: Called now and then. An exception from `check` ends the scoring, and nothing is kept.

    Raises:
        ValueError: The held-out text has no paragraph of prose, or the cache does not have it.
    """
    model, tokenizer, _ = load_script().train.load_run(folder)
    items = held_out_items(_tokens_of(folder, cache), most, check)
    scores = score(model.to(device), tokenizer, items, device=torch.device(device), check=check)
    write_atomically(folder / SCORES, json.dumps(asdict(scores)).encode())


def _tokens_of(folder: Path, cache: Path) -> Path:
    """The tokens that the run was trained on: those with the same tokenizer."""
    own = (folder / "tokenizer.json").read_bytes()
    found = [path.parent for path in sorted(cache.glob("*/tokenizer.json")) if path.read_bytes() == own]
    if not found:
        raise ValueError(f"{cache} has no tokens of {folder} any more")
    return found[0]


@functools.cache
def held_out_items(tokens: Path, most: int, check: Callable[[], None] = ignore) -> list[Item]:
    """Items from validation.npy. Paragraphs that training.npy holds as well are left out."""
    tokenizer = load_script().text.load_tokenizer(tokens / "tokenizer.json")
    training = _documents(tokens / "training.npy", tokenizer, check)
    known = {part for document in training for part in paragraphs(document)}
    return items_of(_documents(tokens / "validation.npy", tokenizer, check), known, most)


def _documents(path: Path, tokenizer: Any, check: Callable[[], None]) -> Iterator[str]:
    """Tokens decoded to text, without loss: the tokenizer is a byte-level BPE."""
    array = np.load(path)
    ends = np.flatnonzero(array == tokenizer.token_to_id(load_script().text.END_OF_TEXT))
    parts = np.split(array, ends)
    for begin in range(0, len(parts), _DOCUMENTS_AT_ONCE):
        check()
        yield from tokenizer.decode_batch([part.tolist() for part in parts[begin : begin + _DOCUMENTS_AT_ONCE]])


def items_of(documents: Iterable[str], known: Collection[str], most: int) -> list[Item]:
    """The first `most` paragraphs of prose.

    Args:
        documents: Held-out texts.
        known: Paragraphs of the training text, as yielded by `paragraphs`. They are left out.
        most: Largest number of items.

    Raises:
        ValueError: There is no such paragraph.
    """
    items: dict[str, Item] = {}
    for document in documents:
        for paragraph in paragraphs(document):
            found = _LAST_WORD.match(paragraph)
            is_prose = paragraph[0].isalpha() and len(paragraph.split()) >= FEWEST_WORDS
            if found and is_prose and paragraph not in known:
                items[paragraph] = Item(found[1], f" {found[2]}")
    if not items:
        raise ValueError("documents must hold paragraphs of prose, got none that ends with a word and a full stop")
    return list(items.values())[:most]


def paragraphs(document: str) -> Iterator[str]:
    """Paragraphs, each in one line. Those that begin with an indented line are skipped: they are code or lists."""
    for block in re.split(r"\n\s*\n", document):
        lines = block.strip("\n").splitlines()
        if lines and not lines[0][:1].isspace():
            yield " ".join(" ".join(lines).split())


@torch.no_grad()
def score(
    model: nn.Module,
    tokenizer: Any,
    items: list[Item],
    *,
    device: torch.device,
    batch_size: int = 16,
    check: Callable[[], None] = ignore,
) -> Scores:
    """Score a model on `items`.

    Args:
        model: input_ids (B, S) int64 -> logits (B, S, V).
        tokenizer: Has a method `encode(text)` whose result has `ids`. Context and word are tokenized separately, so
            that the word has tokens of its own.
        items: What to predict.
        device: Device of `model`.
        batch_size: Number of items in a batch. Rows are padded at their end, which causal attention does not see.
        check: Called before each batch. An exception from `check` ends the scoring.
    """
    model.eval()
    right: dict[int, bool] = {}
    nats: dict[int, float] = {}
    encoded = [(tokenizer.encode(item.context).ids, tokenizer.encode(item.word).ids) for item in items]
    order = sorted(range(len(items)), key=lambda index: sum(map(len, encoded[index])))
    for begin in range(0, len(order), batch_size):
        check()
        part = order[begin : begin + batch_size]
        rows = [torch.tensor([*encoded[index][0], *encoded[index][1]]) for index in part]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        logits = model(tokens).float()
        for row, index in enumerate(part):
            context, word = encoded[index]
            right[index], nats[index] = _score_word(logits[row], len(context), tokens[row, len(context) :][: len(word)])
    return Scores([right[index] for index in range(len(items))], [nats[index] for index in range(len(items))])


def _score_word(logits: Tensor, start: int, word: Tensor) -> tuple[bool, float]:
    """Whether every first choice is right, and the cross-entropy of the word.

    Args:
        logits: (S, V).
        start: Position of the word.
        word: (W,), its tokens.
    """
    predicted = logits[start - 1 : start - 1 + len(word)]
    return bool((predicted.argmax(-1) == word).all()), F.cross_entropy(predicted, word, reduction="sum").item()
