"""What `moment_statistics` means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..library import implement
from .schema import accumulation_dtype, any_tensor, real


def wide(tensor: Tensor) -> Tensor:
    """Real numbers of at least 32 bits: squares and roots of fewer would be rounded away."""
    tensor = real(tensor)
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def total(sizes: list[Tensor], zero: Tensor) -> Tensor:
    """The sum of all elements."""
    return torch.stack([size.sum(dtype=zero.dtype) for size in sizes]).sum() if sizes else zero


def largest(sizes: list[Tensor], zero: Tensor) -> Tensor:
    """The largest of elements that are not below zero."""
    maxima = [size.amax() for size in sizes]
    dtypes = {maximum.dtype for maximum in maxima}
    if len(dtypes) > 1:
        maxima = [maximum.to(zero.dtype) for maximum in maxima]
    return torch.stack(maxima).amax().to(zero.dtype) if maxima else zero


def moment_statistics(momentum: list[Tensor], second_moment: list[Tensor], gradients: list[Tensor]) -> Tensor:
    like = any_tensor(momentum, second_moment, gradients)
    zero = like.new_zeros((), dtype=accumulation_dtype(like.device))
    variance = [wide(tensor).sqrt() for tensor in second_moment if tensor.numel()]
    sizes = [wide(tensor).abs() for tensor in momentum if tensor.numel()]
    squares = [wide(tensor).square() for tensor in gradients if tensor.numel()]
    return torch.stack(
        [total(variance, zero), largest(variance, zero), total(sizes, zero), largest(sizes, zero), total(squares, zero)]
    )


implement("moment_statistics", "reference", moment_statistics)
