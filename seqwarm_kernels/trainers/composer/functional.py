"""Composer's functions `apply_alibi` and `set_batch_sequence_length` on this package's operators.

They work without Composer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ... import models
from ...resizing.containers import flatten_batch
from ...resizing.functional import resize_batch
from ...resizing.packing import packed_bounds
from ...utils.checks import check_int
from ...utils.modules import forward_parameters, guess_batch, unwrapped

_EXAMPLE_LENGTH = 16


def apply_alibi(
    model: nn.Module,
    max_sequence_length: int,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> models.SurgeryReport:
    """Drop-in replacement for `composer.functional.apply_alibi`.

    Calls `seqwarm_kernels.models.apply_alibi` with Composer's arguments.

    Args:
        model: a Hugging Face model, or a ComposerModel around one. Changed in place.
        max_sequence_length: length of the longest sequence in training and evaluation.
        optimizers: the optimizers that already hold the model's parameters.

    Returns:
        A report of the replaced modules. Composer's function returns None.

    Raises:
        ValueError: the model has nothing to replace. Composer's function only warns.
    """
    max_sequence_length = check_int("max_sequence_length", max_sequence_length, minimum=2)
    batch = _example_batch(model, max_sequence_length)
    return models.apply_alibi(model, max_sequence_length, optimizers=optimizers, example_batch=batch)


def _example_batch(model: nn.Module, max_sequence_length: int) -> dict[str, Tensor] | None:
    """Returns a batch for the model inside Composer's HuggingFaceModel, whose forward takes the whole batch."""
    inner = getattr(model, "model", None)
    if not isinstance(inner, nn.Module) or list(forward_parameters(model)) != ["batch"]:
        return None
    device = next((parameter.device for parameter in inner.parameters()), torch.device("cpu"))
    try:
        return guess_batch(inner, 2, min(_EXAMPLE_LENGTH, max_sequence_length), device)
    except ValueError:
        return None


def set_batch_sequence_length(
    batch: Any,
    curr_seq_len: int,
    truncate: bool = True,
    preserve_end_of_sequence: bool = False,
) -> Any:
    """Drop-in replacement for `composer.functional.set_batch_sequence_length`, on `resize_batch`.

    Args:
        batch: names and tensors, each (B, S) or (B, S, features...).
        curr_seq_len: tokens in a new row. Nothing is cut if this is at least S.
        truncate: keep the first tokens of each row, from its first valid one on. If False, read the batch as one stream
            of tokens, cut the stream into rows, and drop the tail. The sequences of a packed batch are cut one by one,
            and without `truncate` no token is dropped.
        preserve_end_of_sequence: with `truncate`, put the last valid token of a cut row into the row's last slot.
            Needs an "attention_mask" (B, S), and rows of one sequence.

    Returns:
        A new batch of the same type, of copies where rows are truncated, and else of the given tensors or their views.

    Raises:
        TypeError, ValueError: `resize_batch` cannot resize the batch to `curr_seq_len`.
    """
    curr_seq_len = check_int("curr_seq_len", curr_seq_len, minimum=1)
    if not truncate:
        return resize_batch(batch, curr_seq_len, mode="flatten", copy=False)
    is_cut = curr_seq_len < rows_and_length(batch)[1]
    return resize_batch(batch, curr_seq_len, keep_last_token=preserve_end_of_sequence, copy=is_cut)


def rows_and_length(batch: Any) -> tuple[int, int]:
    """Returns the number of rows and their length: (0, 0) for a batch without a tensor (B, S, ...)."""
    shapes = [value.shape for value in flatten_batch(batch).values() if isinstance(value, Tensor) and value.dim() > 1]
    # The largest size counts: a mask over pairs of tokens may be (B, 1, S, S).
    return max((shape[0] for shape in shapes), default=0), max((shape[1] for shape in shapes), default=0)


def pass_to_transformers(model: nn.Module, names: Collection[str]) -> None:
    """Lets Composer's HuggingFaceModel pass on entries that the forward in it takes without naming them."""
    wrapper: Any = unwrapped(model)
    if hasattr(wrapper, "model_forward_args"):
        wrapper.model_forward_args.update(names)


def is_packed(batch: Any) -> bool:
    """Whether `resize_batch` takes a batch for a packed one."""
    return packed_bounds(flatten_batch(batch), 1) is not None
