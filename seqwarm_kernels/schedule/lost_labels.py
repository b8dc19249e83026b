"""Batches that lose all their labels by resizing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..ops.call_kind import is_plain_state
from ..ops.resize_batch.schema import IGNORED_LABEL
from ..utils.checks import is_dtensor

NO_LABEL = (
    "no label of a batch is left after resizing to {} tokens, so its loss is 0 or NaN, and the model learns nothing "
    "from it: all labels of these tokens are -100, as those of a long prompt. Begin with a larger min_seq_length, or "
    "resize with mode='reshape'"
)

#: Number of labels whose maximum takes less time than a view of some of them and its maximum.
_FEW = 2048


def has_lost_labels_on_host(batch: Any, resized: Any) -> bool:
    """Whether resizing cut off all labels of a batch.

    False if the labels are not plain tensors in host memory. False while PyTorch traces or one of its modes is active,
    since the values may not be readable.
    """
    labels, kept = _labels_of(batch), _labels_of(resized)
    if kept is None or not _is_on_host(kept) or labels is None or labels.shape == kept.shape:
        return False
    if not is_plain_state():
        return False
    return not _has_some(kept) and bool(_all_lost(labels, kept))


def lost_labels_on_device(batch: Any, resized: Any) -> Tensor | None:
    """A bool: whether resizing cut off all labels of a batch. None without labels, or with labels in host memory."""
    labels, kept = _labels_of(batch), _labels_of(resized)
    if labels is None or kept is None or _is_on_host(kept) or labels.shape == kept.shape or is_dtensor(kept):
        return None
    return _all_lost(labels, kept)


def _is_on_host(labels: Tensor) -> bool:
    return type(labels) is Tensor and labels.is_cpu


def _has_some(kept: Tensor) -> bool:
    """Whether a quick look finds a label, as in most batches. Labels below -100 do not exist."""
    few = kept if kept.numel() <= _FEW else kept.select(0, -1)
    return kept.numel() > 0 and few.amax().item() > IGNORED_LABEL


def _all_lost(labels: Tensor, kept: Tensor) -> Tensor:
    """A bool: whether there are labels, and none of them is kept."""
    return (labels != IGNORED_LABEL).any() & ~(kept != IGNORED_LABEL).any()


def _labels_of(batch: Any) -> Tensor | None:
    labels = batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
    return None if not isinstance(labels, Tensor) or labels.is_floating_point() else labels
