"""Composer's functions `apply_alibi` and `set_batch_sequence_length` on this package's operators. They work without
Composer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ... import models
from ...resizing.containers import leaves
from ...resizing.functional import resize_batch
from ...utils.checks import check_bool
from ...utils.modules import guess_batch, signature

_EXAMPLE_LENGTH = 16


def apply_alibi(
    model: nn.Module,
    max_sequence_length: int,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> models.SurgeryReport:
    """A drop-in for `composer.functional.apply_alibi`: `seqwarm_kernels.models.apply_alibi` with Composer's arguments.

    Args:
        model: changed in place; a Hugging Face model, also inside a ComposerModel.
        max_sequence_length: the longest sequence of training and evaluation.
        optimizers: those that hold the model's parameters already.

    Returns:
        What was replaced. Composer's function returns None.

    Raises:
        ValueError: nothing in the model can be replaced, where Composer's function only warns.
    """
    batch = _example_batch(model, max_sequence_length)
    return models.apply_alibi(model, max_sequence_length, optimizers=optimizers, example_batch=batch)


def _example_batch(model: nn.Module, max_sequence_length: int) -> dict[str, Tensor] | None:
    """For Composer's HuggingFaceModel, whose forward takes a batch as a whole, what the model inside takes."""
    inner = getattr(model, "model", None)
    if not isinstance(inner, nn.Module) or list(signature(model)) != ["batch"]:
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
    is_cut = curr_seq_len < rows_and_length(batch)[1]
    return resize_batch(batch, curr_seq_len, keep_last_token=preserve_end_of_sequence, copy=is_cut)


def rows_and_length(batch: Any) -> tuple[int, int]:
    """The rows of a batch and their length: zeros where it holds no (B, S, ...) tensor."""
    shapes = [value.shape for value in leaves(batch).values() if isinstance(value, Tensor) and value.dim() > 1]
    # A mask over pairs of tokens may be (B, 1, S, S).
    return max((shape[0] for shape in shapes), default=0), max((shape[1] for shape in shapes), default=0)
