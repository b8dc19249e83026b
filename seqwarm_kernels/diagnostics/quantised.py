"""Moments of 8 bits and fewer, as floating-point numbers: torchao's tensors, and bitsandbytes' states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def is_quantised(tensor: Tensor) -> bool:
    """A tensor of a class that brings its own dequantize, as torchao's OptimState8bit does."""
    return type(tensor).dequantize is not Tensor.dequantize


def is_quantised_pair(state: Mapping[str, Any]) -> bool:
    """A parameter's state in bitsandbytes' layout, with both moments; small parameters keep 32 bits there."""
    return all(
        isinstance(state.get(f"state{which}"), Tensor)
        and (state[f"state{which}"].is_floating_point() or f"absmax{which}" in state)
        for which in (1, 2)
    )


def dequantised(state: Mapping[str, Any], which: int) -> Tensor:
    """The first or second moment of bitsandbytes' 8-bit optimizers.

    An element is qmap[code] times the largest value of its block. Blocks hold a power of two of elements, the last one
    what is left. Their number says which power: no two of them cut a tensor into the same number of blocks above one.
    """
    codes = state[f"state{which}"]
    if codes.is_floating_point():
        return codes
    qmap, largest = state[f"qmap{which}"], state[f"absmax{which}"]
    block = 1
    while block * largest.numel() < codes.numel():
        block *= 2
    scale = largest.repeat_interleave(block)[: codes.numel()]
    return qmap[codes.flatten().int()] * scale
