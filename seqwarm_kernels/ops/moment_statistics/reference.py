"""Reference implementation of `moment_statistics`, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..library import implement
from .schema import accumulation_dtype, any_tensor, real


def wide(tensor: Tensor) -> Tensor:
    """Real numbers of at least 32 bits: narrower types would round squares and roots too coarsely."""
    tensor = real(tensor)
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def total_and_largest(sizes: Iterable[Tensor], zero: Tensor) -> tuple[Tensor, Tensor]:
    """The sum and the maximum of all elements, which must not be negative. One tensor is in memory at a time."""
    pairs = [(size.sum(dtype=zero.dtype), size.amax().to(zero.dtype)) for size in sizes if size.numel()]
    if not pairs:
        return zero, zero
    totals, maxima = zip(*pairs, strict=True)
    return torch.stack(totals).sum(), torch.stack(maxima).amax()


def moment_statistics(momentum: list[Tensor], second_moment: list[Tensor], gradients: list[Tensor]) -> Tensor:
    like = any_tensor(momentum, second_moment, gradients)
    zero = like.new_zeros((), dtype=accumulation_dtype(like.device))
    variance = total_and_largest((wide(tensor).sqrt() for tensor in second_moment), zero)
    sizes = total_and_largest((wide(tensor).abs() for tensor in momentum), zero)
    squares, _ = total_and_largest((wide(tensor).square() for tensor in gradients), zero)
    return torch.stack([*variance, *sizes, squares])


implement("moment_statistics", "reference", moment_statistics)
