"""The number of labels by which the Trainer divides the loss of a step whose rows were cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...ops.resize_batch.schema import IGNORED_LABEL
from ..shifted_labels import shifts_labels


def counts_first_labels(trainer: Trainer) -> bool:
    """Whether the Trainer counts the first label of each row, which the loss of its model leaves out.

    It does for models without `loss_type`, such as GPT-2, and some versions do for all models. Whether the loss of a
    class of your own without `loss_type` leaves the label out is not known, so this is False.
    """
    if trainer.compute_loss_func is not None or getattr(trainer, "_loss_shifts_labels", False):
        return False
    model: Any = trainer.model
    kinds = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__mro__  # inside PEFT's
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    is_known = getattr(model, "loss_type", None) is not None or any(kind.__name__ in names for kind in kinds)
    return is_known and shifts_labels(model)


def count_as_whole_rows(
    trainer: Trainer, whole: Sequence[Mapping[str, Any]], cut: Sequence[Mapping[str, Any]], device: torch.device
) -> Tensor:
    """The Trainer's count for the whole batches of a step, scaled by the share of the loss' labels that cutting keeps.

    The count for the cut batches would have a larger share of first labels the shorter their rows are, and the loss
    would grow with their length.
    """
    counts = torch.stack([torch.stack([_count_shifted_labels(batch) for batch in step]).sum() for step in (whole, cut)])
    counts = counts.to(device)
    if trainer.args.average_tokens_across_devices and trainer.args.world_size > 1:  # as the Trainer's count
        counts = trainer.accelerator.reduce(counts, "sum")
    before, kept = counts
    share = torch.where(kept > 0, kept / before, 1.0)  # without labels the loss is 0, and not 0 / 0
    count: Any = trainer._get_num_items_in_batch([*whole], device)
    return count * share


def _count_shifted_labels(batch: Mapping[str, Any]) -> Tensor:
    """The number of labels that the loss of a causal language model counts."""
    shifted = batch.get("shift_labels")
    labels = batch["labels"][..., 1:] if shifted is None else shifted
    return (labels != IGNORED_LABEL).sum()
