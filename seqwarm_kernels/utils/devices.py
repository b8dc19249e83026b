"""float64 on devices: MPS, Apple's GPU, has none."""

from __future__ import annotations

import torch
from torch import Tensor


def has_float64(device: torch.device) -> bool:
    return device.type != "mps"


def to_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64, on the CPU if its device has none."""
    return (tensor if has_float64(tensor.device) else tensor.cpu()).double()
