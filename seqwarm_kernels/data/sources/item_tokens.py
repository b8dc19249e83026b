"""Which tokens an item has, and how many."""

from __future__ import annotations

from typing import Any


def tokens_of(item: Any, name: str = "an item") -> Any:
    """The tokens of an item: the "input_ids" of a mapping, the first entry of a tuple of several, else the item itself.

    Errors call the item `name`.

    Raises:
        ValueError: a mapping has no "input_ids", or they have several dimensions.
    """
    if has_entries(item):
        return tokens_of(item[0], name)
    if not hasattr(item, "keys"):
        return item
    if "input_ids" not in item:
        raise ValueError(f"{name} must have input_ids, got {list(item)}")
    ids = item["input_ids"]
    if getattr(ids, "ndim", 1) > 1 or has_entries(ids):
        got = f"shape {tuple(ids.shape)}" if hasattr(ids, "shape") else f"a {type(ids).__name__} of rows"
        raise ValueError(f"input_ids of an item must have one dimension, got {got}: squeeze them, as in input_ids[0]")
    return ids


def has_entries(item: Any) -> bool:
    """Whether an item is a tuple or list of entries, such as ids and labels, and not of tokens: ints or words."""
    if not isinstance(item, (tuple, list)) or len(item) == 0:
        return False
    first = item[0]
    if isinstance(first, int) or (isinstance(first, (str, bytes)) and isinstance(item, list)):
        return False
    return hasattr(first, "__len__") and getattr(first, "ndim", 1) > 0


def count_tokens(item: Any) -> int:
    """The default `length` of a stream. Errors are those of `tokens_of`, and a TypeError for text."""
    tokens = tokens_of(item, "length must be given, or an item")
    if isinstance(tokens, (str, bytes)):
        raise TypeError(
            f"length must be given for items of text, got {tokens!r:.60}: a character is not a token; pass "
            "length=lambda item: len(tokenizer(item).input_ids), or lengths that write_chunks has stored"
        )
    return len(tokens)
