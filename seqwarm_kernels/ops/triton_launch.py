"""What all Triton kernels share: how they are compiled, and where they run. Imports triton."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton

#: The kernels run on the CPU, in Triton's interpreter.
INTERPRETED: bool = triton.knobs.runtime.interpret

#: For which tensors the dispatcher calls the kernels of this process.
DISPATCH_KEY = "CPU" if INTERPRETED else "CUDA"


def kernel(function: Callable[..., None]) -> Any:
    """`triton.jit` that compiles once for all numbers and tensors: only constants and dtypes make another kernel."""
    parameters = inspect.signature(function).parameters.values()
    return triton.jit(function, do_not_specialize=[p.name for p in parameters if "constexpr" not in str(p.annotation)])


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches inside go to this device."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)
