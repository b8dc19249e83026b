"""The memory of a Composer training at full length, claimed before its first batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from composer.core import Precision, State
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...allocator.warmup import warmup_allocator
from ...utils.modules import unwrapped
from .functional import rows_and_length

_AUTOCAST = {
    Precision.AMP_FP16: torch.float16,
    Precision.AMP_BF16: torch.bfloat16,
    Precision.AMP_FP8: torch.bfloat16,  # what fp8 does not cover
}


def claim_memory(state: State, batch: Any) -> None:
    """Pass the model once with `batch`, in a microbatch's rows, and put everything back.

    With automatic microbatches their size is halved until it fits.

    Raises:
        torch.OutOfMemoryError: it does not fit, and the size of microbatches is the caller's own, or 1.
    """
    if not isinstance(batch, Mapping):
        return
    rows, length = rows_and_length(batch)
    if state.device_train_microbatch_size is not None:
        rows = min(rows, math.ceil(state.device_train_microbatch_size))
    model = unwrapped(state.model)

    def loss_of(outputs: Any, inputs: Any) -> Tensor:
        losses = tree_leaves(model.loss(outputs, inputs))  # type: ignore[operator]
        return torch.stack([loss.mean() for loss in losses]).sum()

    while True:
        report = warmup_allocator(
            state.model,
            length,
            batch_size=rows,
            example_batch=batch,
            loss_fn=loss_of,
            autocast_dtype=_AUTOCAST.get(state.precision),
        )
        if report.out_of_memory is None:
            return
        problem = f"SeqLengthWarmup: {rows} rows of {length} tokens do not fit ({report.out_of_memory.message})"
        if rows == 1 or not state.auto_microbatching:
            raise torch.OutOfMemoryError(f"{problem}; lower device_train_microbatch_size or max_seq_length")
        rows = state.device_train_microbatch_size = rows // 2
        warnings.warn(f"{problem}; device_train_microbatch_size is {rows} now", stacklevel=2)
