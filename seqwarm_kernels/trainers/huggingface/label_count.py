"""Which labels the Trainer counts, to divide the loss of a step by their number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...ops.resize_batch.schema import IGNORED_LABEL
from ...utils.modules import shifts_labels


def counts_first_labels(trainer: Trainer) -> bool:
    """Whether the Trainer may count the first label of each row, which the loss of its model leaves out.

    It does for models without `loss_type`, such as GPT-2, and some versions do for all models. The shorter the rows,
    the smaller the loss would be. Whether the loss of a class of your own without `loss_type` leaves the label out is
    not known, so this is False.
    """
    if trainer.compute_loss_func is not None:
        return False
    model: Any = trainer.model
    kinds = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__mro__  # inside PEFT's
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    is_known = getattr(model, "loss_type", None) is not None or any(kind.__name__ in names for kind in kinds)
    return is_known and shifts_labels(model)


def with_counted_labels(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch whose labels are those that the loss of a causal language model counts."""
    if "labels" not in batch:
        return batch
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch["labels"].clone()
        labels[..., 0] = IGNORED_LABEL
    return {**batch, "labels": labels}
