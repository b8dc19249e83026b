"""Collate lists of items into padded or packed batches with the keys of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ...ops.resize_batch.schema import IGNORED_LABEL
from ...utils.checks import check_int, check_iterable
from ..batch_planning.plan import Piece, check_size

_UNTOKENIZED = "which is not tokenized: pass a transform to Prepare"
_INTS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


class PaddedCollator:
    """Pads the rows on the right to the longest one, rounded up.

    The entries of a batch::

        input_ids (B, S) int64
        attention_mask (B, S) int64, 1 at tokens, 0 at padding
        labels (B, S) int64, −100 at padding

    An item is a sequence or tensor of ids, or a mapping with "input_ids" and optionally "labels" (default: the ids).
    Other entries of a mapping are left out. An empty batch has B = 0 and S = `multiple_of`. An empty batch has no
    labels, so it contributes nothing to a sum over labels, but a mean over its labels is NaN.

    Args:
        pad_token_id: the id at padding.
        multiple_of: S is a multiple of this number. Pass the planner's value.
        max_tokens: raise an error if B · S is larger. `ResumableLoader` and `batch_loader` check the planner's value.
            With a plain DataLoader, which does not know the planner, pass it here.
    """

    def __init__(self, pad_token_id: int = 0, *, multiple_of: int = 1, max_tokens: int | None = None) -> None:
        self.pad_token_id = check_int("pad_token_id", pad_token_id)
        self.multiple_of = check_size("multiple_of", multiple_of)
        self.max_tokens = None if max_tokens is None else check_int("max_tokens", max_tokens, minimum=1)

    def __call__(self, items: Sequence[Any]) -> dict[str, Tensor]:
        rows = _all_ids_and_labels(items)
        longest = max((len(ids) for ids, _ in rows), default=0)
        width = max(-(-longest // self.multiple_of), 1) * self.multiple_of
        check_tokens(len(rows) * width, self.max_tokens)
        input_ids = torch.full((len(rows), width), self.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        labels = torch.full_like(input_ids, IGNORED_LABEL)
        for row, (ids, own_labels) in enumerate(rows):
            input_ids[row, : len(ids)] = ids
            attention_mask[row, : len(ids)] = 1
            labels[row, : len(ids)] = own_labels
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


class PackedCollator:
    """Concatenates the sequences into one row without padding, for `alibi_attention_varlen` and models converted by
    `apply_alibi`.

    The entries of a batch::

        input_ids (1, T) int64
        position_ids (1, T) int64, from 0 in each sequence
        labels (1, T) int64, −100 at the first token of each sequence, which no token predicts
        cu_seq_lens_q, cu_seq_lens_k (B + 1,) int32, boundaries of the sequences; the same tensor
        max_length_q, max_length_k int, length of the longest sequence

    Items are those of `PaddedCollator`. Items without tokens are left out. An empty batch has T = 0 and B = 0.

    Args:
        max_tokens: raise an error if T is larger, as in `PaddedCollator`.
    """

    def __init__(self, *, max_tokens: int | None = None) -> None:
        self.max_tokens = None if max_tokens is None else check_int("max_tokens", max_tokens, minimum=1)

    def __call__(self, items: Sequence[Any]) -> dict[str, Tensor | int]:
        sequences = [(ids, labels) for ids, labels in _all_ids_and_labels(items) if len(ids)]
        lengths = [len(ids) for ids, _ in sequences]
        bounds = list(accumulate(lengths, initial=0))
        check_tokens(bounds[-1], self.max_tokens)
        empty = torch.zeros(0, dtype=torch.int64)  # torch.cat needs at least one tensor
        labels = torch.cat([empty, *(labels for _, labels in sequences)])
        labels[bounds[:-1]] = IGNORED_LABEL
        cu_seq_lens = torch.tensor(bounds, dtype=torch.int32)
        longest = max(lengths, default=0)
        return {
            "input_ids": torch.cat([empty, *(ids for ids, _ in sequences)])[None],
            "position_ids": torch.cat([empty, *map(torch.arange, lengths)])[None],
            "labels": labels[None],
            "cu_seq_lens_q": cu_seq_lens,
            "cu_seq_lens_k": cu_seq_lens,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def _all_ids_and_labels(items: Any) -> list[tuple[Tensor, Tensor]]:
    wanted = "a list of items"
    check_iterable("items", items, wanted)
    if isinstance(items, Piece):
        raise TypeError(f"items must be {wanted}, got Piece")
    return [_ids_and_labels(item) for item in items]


def _ids_and_labels(item: Any) -> tuple[Tensor, Tensor]:
    """Ids and labels, (tokens,) int64 each."""
    if not isinstance(item, Mapping):
        ids = _tokens("an item", item)
        return ids, ids
    if "input_ids" not in item:
        raise ValueError(f"an item must have input_ids, got {list(item)}")
    ids = _tokens("input_ids", item["input_ids"])
    if item.get("labels") is None:
        return ids, ids
    labels = _tokens("labels", item["labels"])
    if len(labels) != len(ids):
        raise ValueError(f"labels must be as long as the {len(ids)} input_ids of their item, got {len(labels)}")
    return ids, labels


def _tokens(name: str, values: Any) -> Tensor:
    """Convert ids or labels to a tensor, (tokens,) int64."""
    if isinstance(values, (str, bytes, Integral, Piece)) or not hasattr(values, "__len__"):
        raise TypeError(f"{name} must hold one int for each token, got {_kind(values)}")
    try:
        tokens = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name} must hold one int for each token, got {_contents(values)}: {error}") from error
    if tokens.dim() == 1 and len(tokens) == 0:
        return torch.zeros(0, dtype=torch.int64)
    if tokens.dim() != 1 or tokens.dtype not in _INTS:
        raise ValueError(f"{name} must hold one int for each token, got {tokens.dtype} of shape {tuple(tokens.shape)}")
    if tokens.dtype == torch.uint64 and (tokens.to(torch.int64) < 0).any():
        raise ValueError(f"{name} must hold ints below 2**63, got {max(tokens.tolist())}")
    return tokens.to(torch.int64)


def _kind(values: Any) -> str:
    """The type or value, with a hint at the missing step."""
    if isinstance(values, Piece):
        return "a Piece: wrap the dataset in PieceDataset, or use Prepare"
    if isinstance(values, (str, bytes)):
        return f"{values!r:.60}, {_UNTOKENIZED}"
    if isinstance(values, Integral):
        return f"the int {values}: if it is the index of an item, pass a dataset to Prepare"
    return type(values).__name__


def _contents(values: Any) -> str:
    """The invalid values, with a hint if they are text."""
    has_text = isinstance(values, (list, tuple)) and any(isinstance(value, str) for value in values)
    return f"{values!r:.60}" + (f", {_UNTOKENIZED}" if has_text else "")


def check_tokens(tokens: int, max_tokens: int | None) -> None:
    """A batch of `tokens` tokens, padding included, must not be over the budget."""
    if max_tokens is not None and tokens > max_tokens:
        raise ValueError(
            f"max_tokens is {max_tokens}, got a batch of {tokens} tokens: items are longer than planned, so their "
            "lengths were counted too short; or the collator pads otherwise than the planner (packed, multiple_of)"
        )
