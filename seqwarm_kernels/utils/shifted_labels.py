"""Whether a model's loss leaves out the first label of each row."""

from __future__ import annotations

import sys

from torch import nn

from .modules import unwrapped


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
