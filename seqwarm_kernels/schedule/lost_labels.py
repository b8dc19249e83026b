"""Batches that lose all their labels by resizing."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..ops.call_kind import is_plain_state
from ..resizing.containers import cut_entries
from ..resizing.entry_names import holds_labels, is_loss_mask
from ..utils.caller_warnings import warn_caller
from ..utils.checks import is_dtensor

#: Batches whose labels are checked, in 4 to 10 µs each. Later batches are longer, and keep more labels.
LABEL_CHECKS = 500

NO_LABEL = (
    "no label of a batch is left after resizing to {} tokens, so its loss is 0 or NaN, and the model learns nothing "
    "from it: all labels of these tokens are negative, or their loss mask is 0, as for a long prompt. Begin with a "
    "larger min_seq_length, or resize with mode='reshape'"
)

#: Of masks of the loss that are looked at. Torch cannot compare others.
_MASK_DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)

#: Number of labels whose maximum takes less time than a view of some of them and its maximum.
_FEW = 2048


def warn_of_lost_labels(batch: Any, resized: Any, seq_length: int) -> bool:
    """Warn if resizing cut off all labels of a batch. Waits for the device of the labels.

    Returns:
        Whether it warned. False while PyTorch traces or one of its modes is active.
    """
    is_lost = has_lost_labels_on_host(batch, resized)
    if not is_lost and is_plain_state():
        is_lost = bool(lost_labels_on_device(batch, resized))
    if is_lost:
        warn_caller(NO_LABEL.format(seq_length))
    return is_lost


def has_lost_labels_on_host(batch: Any, resized: Any) -> bool:
    """Whether resizing cut off all labels of an entry of a batch.

    False if the labels are not plain tensors in host memory. False while PyTorch traces or one of its modes is active,
    since the values may not be readable.
    """
    return any(
        not _has_some(kept, ignored) and bool(_all_lost(labels, kept, ignored))
        for labels, kept, ignored in _cut_labels(batch, resized)
        if _is_on_host(kept) and is_plain_state()
    )


def lost_labels_on_device(batch: Any, resized: Any) -> Tensor | None:
    """A bool: whether resizing cut off all labels of an entry. None without labels, or with labels in host memory."""
    lost = [
        _all_lost(labels, kept, ignored)
        for labels, kept, ignored in _cut_labels(batch, resized)
        if not _is_on_host(kept) and not is_dtensor(kept)
    ]
    return functools.reduce(operator.or_, lost) if lost else None


def _is_on_host(labels: Tensor) -> bool:
    return type(labels) is Tensor and labels.is_cpu


def _has_some(kept: Tensor, ignored: int) -> bool:
    """Whether a quick look finds a label, as in most batches."""
    few = kept if kept.numel() <= _FEW else kept.select(0, -1)
    return kept.numel() > 0 and few.amax().item() > ignored


def _all_lost(labels: Tensor, kept: Tensor, ignored: int) -> Tensor:
    """A bool: whether there are labels, and none of them is kept."""
    return (labels > ignored).any() & ~(kept > ignored).any()


def _holds_signed_integers(tensor: Tensor) -> bool:
    return tensor.dtype.is_signed and not (tensor.is_floating_point() or tensor.is_complex())


def _cut_labels(batch: Any, resized: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """The entries that hold labels for `resize_batch`, or the loss mask, and were cut: before and after.

    The number and those below it are what the loss leaves out: of labels the negative ones, such as -100 and -1.
    """
    for name, labels, kept in cut_entries(batch, resized):
        if is_loss_mask(name) and kept.dtype in _MASK_DTYPES:
            yield labels, kept, 0
        elif _holds_signed_integers(kept) and holds_labels(name, kept.dtype):
            yield labels, kept, -1
