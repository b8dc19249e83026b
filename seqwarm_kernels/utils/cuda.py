"""CUDA devices other than the current one."""

from __future__ import annotations

import torch


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` is captured in a CUDA graph. Torch asks about the current device only."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
