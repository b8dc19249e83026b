"""What devices can do, and what they are doing."""

from __future__ import annotations

import torch
from torch import Tensor


def has_float64(device: torch.device) -> bool:
    """MPS, Apple's GPU, has none."""
    return device.type != "mps"


def to_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64, on the CPU if its device has none."""
    return (tensor if has_float64(tensor.device) else tensor.cpu()).double()


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` is captured in a CUDA graph. Torch asks about the current device only."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
