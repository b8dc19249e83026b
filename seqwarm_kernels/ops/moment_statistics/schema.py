"""Schema and fake implementation of `seqwarm::moment_statistics`.

Arguments: lists of dense floating-point tensors of any shapes, dtypes and strides, on one device, with at least one
tensor in all lists together. Empty tensors do not affect the result.

momentum      first moments m.
second_moment second moments v, not below zero.
gradients     gradients g.

A complex number counts as two real numbers.

Returns five numbers (5,), float64 (float32 on MPS, which has no float64): Σ √v, the largest √v, Σ |m|, the largest |m|,
Σ g². Each is taken over all elements of its list, and is 0 if the list has no elements. A NaN in a list makes the
numbers of that list NaN.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from ...utils.devices import has_float64
from ..library import define

ARGUMENTS = "Tensor[] momentum, Tensor[] second_moment, Tensor[] gradients"
BACKENDS = ("native", "triton", "reference")  # best first


class Statistic(IntEnum):
    """Indices of the numbers in the result."""

    VARIANCE_L1 = 0
    VARIANCE_MAX = 1
    MOMENTUM_L1 = 2
    MOMENTUM_MAX = 3
    GRADIENT_SQUARES = 4


def any_tensor(*lists: list[Tensor]) -> Tensor:
    """One of the tensors. All tensors are on the same device."""
    for tensors in lists:
        if tensors:
            return tensors[0]
    raise ValueError("moment_statistics needs at least one tensor, got three empty lists")


def real(tensor: Tensor) -> Tensor:
    """A view of complex numbers as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def accumulation_dtype(device: torch.device) -> torch.dtype:
    return torch.float64 if has_float64(device) else torch.float32


def _fake(momentum: list[Tensor], second_moment: list[Tensor], gradients: list[Tensor]) -> Tensor:
    like = any_tensor(momentum, second_moment, gradients)
    return like.new_empty(len(Statistic), dtype=accumulation_dtype(like.device))


define("moment_statistics", f"({ARGUMENTS}) -> Tensor", BACKENDS, fake=_fake)
