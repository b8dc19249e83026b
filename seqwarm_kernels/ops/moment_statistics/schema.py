"""Schema and fake implementation of `seqwarm::moment_statistics`.

Arguments: lists of dense floating-point tensors of any shapes, dtypes and strides, on one device, with at least one
tensor in all of them together. Empty tensors count for nothing.

momentum      first moments m; a complex number counts as two real ones.
second_moment second moments v, not below zero.
gradients     gradients g.

Returns five numbers (5,), float64 (float32 on MPS, which has no float64): Σ √v, the largest √v, Σ |m|, the largest |m|,
Σ g²; each over all elements of its list, 0 where there is none. A NaN anywhere in a list makes its numbers NaN.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from ..library import define

ARGUMENTS = "Tensor[] momentum, Tensor[] second_moment, Tensor[] gradients"
BACKENDS = ("native", "triton", "reference")  # best first


class Statistic(IntEnum):
    """The places of the numbers."""

    VARIANCE_L1 = 0
    VARIANCE_MAX = 1
    MOMENTUM_L1 = 2
    MOMENTUM_MAX = 3
    GRADIENT_SQUARES = 4


def any_tensor(*lists: list[Tensor]) -> Tensor:
    """One of the tensors: all are on its device."""
    for tensors in lists:
        if tensors:
            return tensors[0]
    raise ValueError("moment_statistics needs a tensor at least, got three empty lists")


def real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def accumulation_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _fake(momentum: list[Tensor], second_moment: list[Tensor], gradients: list[Tensor]) -> Tensor:
    like = any_tensor(momentum, second_moment, gradients)
    return like.new_empty(len(Statistic), dtype=accumulation_dtype(like.device))


define("moment_statistics", f"({ARGUMENTS}) -> Tensor", BACKENDS, fake=_fake)
