"""Composer's names and arguments on this package's operators. Composer itself is not needed."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import Tensor

from ..batch import resize_batch
from ..checks import check_bool


def set_batch_sequence_length(
    batch: MutableMapping[str, Any],
    curr_seq_len: int,
    truncate: bool = True,
    preserve_end_of_sequence: bool = False,
) -> Any:
    """A drop-in for `composer.functional.set_batch_sequence_length`, on `resize_batch`.

    It differs where Composer's own function surprises: the given batch stays as it is; rows without a valid token are
    cut as all others are; the last valid token is found with padding on either side; entries that are no tensors, and
    vectors with an entry for each row, are kept under truncation.

    Args:
        batch: names and tensors, each (B, S) or (B, S, features...).
        curr_seq_len: tokens in a new row; nothing is cut where it is not below S.
        truncate: keep the first tokens of each row; if False, cut the whole batch, read as one stream, into rows, and
            drop the tail.
        preserve_end_of_sequence: with `truncate`, a row whose last valid token was cut takes it in its last slot.
            Needs an "attention_mask" (B, S).

    Returns:
        A new batch of the same type. Its tensors are the given ones where nothing is cut, views of them where the
        stream is, contiguous copies where rows are truncated.

    Raises:
        TypeError, ValueError: as `resize_batch`.
    """
    check_bool("truncate", truncate)
    check_bool("preserve_end_of_sequence", preserve_end_of_sequence)
    if not truncate:
        return resize_batch(batch, curr_seq_len, mode="flatten", copy=False)
    lengths = [value.shape[1] for value in batch.values() if isinstance(value, Tensor) and value.dim() > 1]
    is_cut = curr_seq_len < max(lengths, default=0)
    return resize_batch(batch, curr_seq_len, keep_last_token=preserve_end_of_sequence, copy=is_cut)
