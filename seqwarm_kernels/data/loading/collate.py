"""Collate lists of items into padded or packed batches with the keys of `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ops.resize_batch.schema import IGNORED_LABEL, LOSS_MASKS
from ...resizing.entry_names import BOUNDARIES, INDICES, POSITIONS
from ..batch_planning.plan import IntArray

#: The id of a packed batch without tokens. Every vocabulary has it.
_PACKED_PADDING = 0
#: The usual types of ids. They are checked first, because a check for a Mapping takes long.
_ARRAYS = (np.ndarray, Tensor, list)
_NO_ROW = np.empty(0, np.int64)  # np.concatenate needs at least one array, too
#: Entries of items that were packed before, and whether their ints tell several sequences. TRL writes seq_lengths.
_TELLS_SEVERAL: dict[str, Callable[[NDArray[Any]], bool]] = {
    **dict.fromkeys(POSITIONS, lambda row: bool((row[1:] <= row[:1]).any())),
    **dict.fromkeys(INDICES, lambda row: bool((row != row[:1]).any())),
    **dict.fromkeys(BOUNDARIES, lambda row: len(row) > 2),
    **dict.fromkeys(("seq_lengths", "doc_lens"), lambda row: len(row) > 1),
}


class PaddedCollator:
    """Pads the rows on the right to the longest one, rounded up.

    The entries of a batch::

        input_ids (B, S) int64
        attention_mask (B, S) int64, 1 at tokens, 0 at padding
        labels (B, S) int64, −100 at padding

    Labels are not shifted: the default ones are the ids, as losses of transformers' models expect. In a loop of your
    own compare `logits[:, :-1]` with `labels[:, 1:]`.

    An item is a sequence or tensor of ids, or a mapping with "input_ids" and optionally "labels" (default: the ids).
    Other entries are left out, but raise a ValueError if they contradict the batch: an "attention_mask" that hides a
    token; labels other than −100 where a "completion_mask", "assistant_masks" or "loss_mask" is 0; and "position_ids",
    "seq_lengths", "seq_idx", "document_ids" or boundaries such as "cu_seq_lens_q" of several sequences, since an item
    is one. Entries of several dimensions or of floating point are not read.

    An empty list of items gives one row of `multiple_of` tokens of padding, so that models run on it. It has no labels,
    so it contributes nothing to a sum over labels, but a mean over its labels is NaN.

    Args:
        pad_token_id: the id at padding.
        multiple_of: S is a multiple of this number. Pass the planner's value.
        max_tokens: raise an error if B · S is larger. `ResumableLoader` and `batch_loader` check the planner's value. A
            DataLoader alone does not know the planner: pass it here.
    """

    def __init__(self, pad_token_id: int = 0, *, multiple_of: int = 1, max_tokens: int | None = None) -> None:
        self.pad_token_id = pad_token_id
        self.multiple_of = multiple_of
        self.max_tokens = max_tokens

    def __call__(self, items: Sequence[Any]) -> dict[str, Tensor]:
        lengths, ids, labels = _joined(items or [[]])
        width = max(-(-int(lengths.max()) // self.multiple_of), 1) * self.multiple_of
        check_budget(len(lengths) * width, self.max_tokens)
        is_token = np.arange(width) < lengths[:, None]
        return {
            "input_ids": _padded(ids, is_token, self.pad_token_id),
            "attention_mask": torch.from_numpy(is_token.astype(np.int64)),
            "labels": _padded(labels, is_token, IGNORED_LABEL),
        }


class PackedCollator:
    """Concatenates the sequences into one row without padding, for `alibi_attention_varlen` and models converted by
    `apply_alibi`.

    The entries of a batch::

        input_ids (1, T) int64
        position_ids (1, T) int64, from 0 in each sequence
        labels (1, T) int64, −100 at the first token of each sequence, which no token predicts
        cu_seq_lens_q, cu_seq_lens_k (B + 1,) int32, boundaries of the sequences; the same tensor
        max_length_q, max_length_k int, length of the longest sequence

    Labels are not shifted, as in `PaddedCollator`: compare `logits[0, :-1]` with `labels[0, 1:]`.
    Items are those of `PaddedCollator`. Items without tokens are left out. Without other items, the batch is a sequence
    of one token of padding, with id 0, so that models run on it. It has no labels, as that of `PaddedCollator`. No mask
    hides the token, so it counts where tokens are counted.

    Args:
        max_tokens: raise an error if T is larger, as in `PaddedCollator`.
    """

    def __init__(self, *, max_tokens: int | None = None) -> None:
        self.max_tokens = max_tokens

    def __call__(self, items: Sequence[Any]) -> dict[str, Tensor | int]:
        lengths, ids, labels = _joined(items)
        if not len(ids):
            lengths, ids, labels = _joined([[_PACKED_PADDING]])
        check_budget(len(ids), self.max_tokens)
        lengths = lengths[lengths > 0]
        bounds = np.append(0, np.cumsum(lengths))
        labels = labels.copy()  # may be the ids
        labels[bounds[:-1]] = IGNORED_LABEL
        cu_seq_lens = torch.from_numpy(bounds.astype(np.int32))
        longest = int(lengths.max())
        return {
            "input_ids": torch.from_numpy(ids)[None],
            "position_ids": torch.from_numpy(np.arange(len(labels)) - np.repeat(bounds[:-1], lengths))[None],
            "labels": torch.from_numpy(labels)[None],
            "cu_seq_lens_q": cu_seq_lens,
            "cu_seq_lens_k": cu_seq_lens,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def _joined(items: Sequence[Any]) -> tuple[IntArray, IntArray, IntArray]:
    """Lengths (items,) int64; ids and labels (tokens,) int64, one item after another, the same array if all are."""
    pairs = [_ids_and_labels(item) for item in items]
    lengths = np.fromiter((len(ids) for ids, _ in pairs), np.int64, len(pairs))
    ids = _concatenated([ids for ids, _ in pairs])
    has_labels = any(labels is not ids for ids, labels in pairs)
    return lengths, ids, _concatenated([labels for _, labels in pairs]) if has_labels else ids


def _concatenated(arrays: list[NDArray[Any]]) -> IntArray:
    """Convert all arrays at once, which is faster than one by one."""
    return np.concatenate([_NO_ROW, *arrays], dtype=np.int64, casting="unsafe")


def _padded(tokens: IntArray, is_token: NDArray[np.bool_], padding: int) -> Tensor:
    rows = np.full(is_token.shape, padding, np.int64)
    rows[is_token] = tokens
    return torch.from_numpy(rows)


def _ids_and_labels(item: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids and labels, (tokens,) ints each."""
    if isinstance(item, _ARRAYS) or not isinstance(item, Mapping):
        ids = _tokens("an item", item)
        return ids, ids
    ids = labels = _tokens("input_ids", item["input_ids"])
    if item.get("labels") is not None:
        labels = _tokens("labels", item["labels"])
        if len(labels) != len(ids):
            raise ValueError(f"labels must be as long as the {len(ids)} input_ids of their item, got {len(labels)}")
    for name, values in item.items():
        # The search of a list takes a tenth of the time of an array.
        if name == "attention_mask" and (0 in values if isinstance(values, list) else (_row(values) == 0).any()):
            raise ValueError("attention_mask of an item must be 1 at each token, got 0: tokenize without padding")
        if name in LOSS_MASKS:
            is_ignored = _row(values) == 0
            if is_ignored.any() and (labels[is_ignored] != IGNORED_LABEL).any():
                raise ValueError(f"labels of an item must be {IGNORED_LABEL} where its {name} is 0")
        if name in _TELLS_SEVERAL and _TELLS_SEVERAL[name](_row(values)):
            raise ValueError(f"{name} of an item must be of one sequence, got several: pass each as an item")
    return ids, labels


def _tokens(name: str, values: Any) -> NDArray[Any]:
    """Ids or labels as an array, (tokens,) ints. An array without tokens may have any dtype."""
    tokens = np.asarray(values)
    if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and tokens.size):
        raise ValueError(f"{name} must hold one int for each token, got {values!r:.60}")
    return tokens


def _row(values: Any) -> NDArray[Any]:
    """Ints or bools in one dimension as an array. Empty for other values, such as masks of pairs, or additive ones."""
    try:
        row = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # rows of several lengths, bfloat16
        return _NO_ROW
    return row if row.ndim == 1 and row.dtype.kind in "biu" else _NO_ROW


def check_budget(tokens: int, max_tokens: int | None) -> None:
    """A batch of `tokens` tokens, padding included, must not be over the budget."""
    if max_tokens is not None and tokens > max_tokens:
        raise ValueError(
            f"a batch must have at most max_tokens, {max_tokens}, got {tokens}: items are longer than planned, or the "
            "planner has another packed or multiple_of"
        )
