"""Compilation and launch of all Triton kernels. Imports triton."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton

#: Whether kernels run on the CPU, in Triton's interpreter.
INTERPRETED: bool = triton.knobs.runtime.interpret

#: Tensors with this dispatch key are served by the kernels of this process.
DISPATCH_KEY = "CPU" if INTERPRETED else "CUDA"


def kernel(function: Callable[..., None]) -> Any:
    """`triton.jit` without specialization: only constexpr arguments and dtypes cause another compilation."""
    parameters = inspect.signature(function).parameters.values()
    return triton.jit(function, do_not_specialize=[p.name for p in parameters if "constexpr" not in str(p.annotation)])


def on(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which kernels are launched on `device`."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)
