"""Zero-shot prediction of the last word of held-out paragraphs, as LAMBADA asks for it.

D. Paperno et al., "The LAMBADA dataset", arXiv 1606.06031; counted as Radford et al. do for GPT-2: a word is right if
the model's first choice is right at every token of it, each after the tokens before it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEWEST_WORDS = 20  #: of a paragraph
FEWEST_LETTERS = 3  #: of its last word; shorter ones say little

#: The end of a paragraph of prose: text, one word, a full stop.
_LAST_WORD = re.compile(rf"^(.*[\w,;:)`*'\"]) ([A-Za-z]{{{FEWEST_LETTERS},}})\.$", re.DOTALL)


@dataclass(frozen=True)
class Item:
    context: str
    word: str  #: with the space before it


@dataclass(frozen=True)
class Scores:
    """Of one model."""

    right: list[bool]  #: by item
    nats: list[float]  #: of the whole last word, by item

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def perplexity(self) -> float:
        """Of the last word as a whole."""
        return math.exp(sum(self.nats) / len(self.nats))


def items_of(documents: Iterable[str], known: Collection[str], most: int) -> list[Item]:
    """From paragraphs of prose in `documents`, the first `most` of them.

    Args:
        documents: held out.
        known: paragraphs of the training text, which do not count, as `paragraphs` gives them.
        most: items.

    Raises:
        ValueError: there is not one such paragraph.
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
    """Lines up to a blank one, joined by spaces; indented ones are code or lists."""
    for block in re.split(r"\n\s*\n", document):
        lines = block.strip("\n").splitlines()
        if lines and not lines[0][:1].isspace():
            yield " ".join(" ".join(lines).split())


def ignore() -> None:
    pass


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
    """
    Args:
        model: input_ids (B, S) int64 -> logits (B, S, V).
        tokenizer: with `encode(text).ids`.
        items: context and word are tokenised apart, so that the word has tokens of its own.
        device: of `model`.
        batch_size: items at once. Rows are padded behind their end, where causal attention does not look.
        check: called before each batch; what it raises ends the scoring.
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
            right[index], nats[index] = _of_word(logits[row], len(context), tokens[row, len(context) :][: len(word)])
    return Scores([right[index] for index in range(len(items))], [nats[index] for index in range(len(items))])


def _of_word(logits: Tensor, start: int, word: Tensor) -> tuple[bool, float]:
    """logits (S, V), word (W,) at `start`: whether every first choice is right, and the word's cross-entropy."""
    predicted = logits[start - 1 : start - 1 + len(word)]
    return bool((predicted.argmax(-1) == word).all()), F.cross_entropy(predicted, word, reduction="sum").item()
