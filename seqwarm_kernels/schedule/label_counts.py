"""The number of labels that a loss counts, before and after resizing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.resize_batch.schema import IGNORED_LABEL
from ..resizing.containers import flatten_batch
from ..utils.modules import unwrapped

#: Argument in which Hugging Face's Trainer passes the number of labels in all batches of a step, counted before
#: resizing. A model that gets it divides its sum of losses by it.
NUM_ITEMS_IN_BATCH = "num_items_in_batch"

#: Entries with the labels of a loss. Those of the second are shifted already, and are used instead of the first.
_LABELS, _SHIFT_LABELS = "labels", "shift_labels"


def prefixes_of_counts(batch: Any) -> list[str]:
    """What stands before the name of each `num_items_in_batch` in a batch: "" or the path of its container."""
    entries = flatten_batch(batch)
    paths = [path for path in entries if str(path).rpartition(".")[2] == NUM_ITEMS_IN_BATCH]
    prefixes = [path.removesuffix(NUM_ITEMS_IN_BATCH) for path in paths if entries[path] is not None]
    for prefix in prefixes:
        check_labels(entries, prefix)
    return prefixes


def check_labels(entries: Mapping[Any, Any], prefix: str) -> None:
    if entries.get(prefix + _LABELS) is None:
        names = [str(name) for name in entries if name != prefix + NUM_ITEMS_IN_BATCH]
        raise ValueError(
            f"labels must be passed to the model with {NUM_ITEMS_IN_BATCH}, got {', '.join(names)}: labels outside of "
            "the model are not cut to the length of its outputs; compute the loss in its forward, without a "
            "compute_loss_func, or in Hugging Face's Trainer call warmup.add_to(trainer) instead of passing it in "
            "callbacks"
        )


def shifts_labels(model: nn.Module) -> bool:
    """Whether a Hugging Face model's loss leaves out the first label of each row, as in causal language models.

    A model without `loss_type`, such as GPT-2, has the loss of causal language models.
    """
    inner = unwrapped(model)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        return False
    loss_type = getattr(inner, "loss_type", None)
    losses = sys.modules.get("transformers.loss.loss_utils")  # is imported by all models that have a type of loss
    return loss_type is None or (
        losses is not None and losses.LOSS_MAPPING.get(str(loss_type)) is losses.ForCausalLMLoss
    )


def count_loss_labels(entries: Mapping[str, Any], shifts: bool, prefix: str = "") -> Tensor:
    """The number of labels that a loss counts. A loss that shifts labels leaves out the first of each row."""
    shifted = entries.get(prefix + _SHIFT_LABELS)
    labels = entries[prefix + _LABELS][..., 1 if shifts else 0 :] if shifted is None else shifted
    return (labels != IGNORED_LABEL).sum()


def kept_share(count: Tensor, kept: Tensor) -> Tensor:
    """The share of the labels that resizing keeps. 1 if there are none."""
    return torch.where(count > 0, kept / count, 1.0)


def scaled_count(num_items: Any, share: Tensor) -> Tensor:
    """The number of labels after resizing. It is not scaled to 0, for a loss of 0 instead of 0 / 0."""
    return num_items * torch.where(share > 0, share, 1.0)
