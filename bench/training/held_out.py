"""The last words of a finished run's held-out text, scored once and kept in its folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seqwarm_kernels.utils.files import write_atomically

from .last_words import Item, Scores, ignore, items_of, paragraphs, score
from .script import load_script

SCORES = "last_words.json"
_DOCUMENTS_AT_ONCE = 64


def read_scores(folder: Path) -> Scores | None:
    """None where they are still to be made."""
    path = folder / SCORES
    return Scores(**json.loads(path.read_text())) if path.exists() else None


def score_run(folder: Path, tokens: Path, most: int, device: str, check: Callable[[], None] = ignore) -> None:
    """
    Args:
        folder: of a finished run.
        tokens: the script's cache.
        most: items.
        device: to score on.
        check: called now and then; what it raises ends the scoring, of which nothing is kept.

    Raises:
        ValueError: the held-out text has no paragraph of prose, or is gone.
    """
    model, tokenizer, _ = load_script().load_run(folder)
    items = held_out_items(_tokens_of(folder, tokens), most, check)
    scores = score(model.to(device), tokenizer, items, device=torch.device(device), check=check)
    write_atomically(folder / SCORES, json.dumps(asdict(scores)).encode())


def _tokens_of(folder: Path, cache: Path) -> Path:
    """Those that the run was trained on: made with its tokenizer."""
    own = (folder / "tokenizer.json").read_bytes()
    found = [path.parent for path in sorted(cache.glob("*/tokenizer.json")) if path.read_bytes() == own]
    if not found:
        raise ValueError(f"{cache} has no tokens of {folder} any more")
    return found[0]


@functools.cache
def held_out_items(tokens: Path, most: int, check: Callable[[], None] = ignore) -> list[Item]:
    """From validation.npy; a paragraph that training.npy has, too, does not count."""
    tokenizer = load_script().load_tokenizer(tokens)
    training = _documents(tokens / "training.npy", tokenizer, check)
    known = {part for document in training for part in paragraphs(document)}
    return items_of(_documents(tokens / "validation.npy", tokenizer, check), known, most)


def _documents(path: Path, tokenizer: Any, check: Callable[[], None]) -> Iterator[str]:
    """Text again: a byte-level BPE loses nothing."""
    array = np.load(path)
    ends = np.flatnonzero(array == tokenizer.token_to_id(load_script().END_OF_TEXT))
    parts = np.split(array, ends)
    for begin in range(0, len(parts), _DOCUMENTS_AT_ONCE):
        check()
        yield from tokenizer.decode_batch([part.tolist() for part in parts[begin : begin + _DOCUMENTS_AT_ONCE]])
