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


class Launch:
    """Launches of a kernel in which only some arguments change.

    To find the compiled kernel, Triton looks at every argument of a launch. Here it does so in the first one.

    Args:
        kernel: made by `kernel`.
        programs: size of the grid.
        arguments: by name, the same in all launches. Tensors must keep their dtypes, and None stays None.
    """

    def __init__(self, kernel: Any, programs: int, **arguments: Any) -> None:
        self._kernel = kernel
        self._grid = (programs, 1, 1)
        self._names = kernel.arg_names
        self._arguments = arguments
        self._values = [arguments.get(name) for name in self._names]
        self._compiled: Any = None

    def __call__(self, **arguments: Any) -> None:
        """Launch the kernel with the rest of its arguments, the same ones in every launch."""
        if self._compiled is None or self._kernel.pre_run_hooks:  # None: always in the interpreter
            self._compiled = self._kernel[self._grid](**arguments, **self._arguments)
        else:
            self._compiled[self._grid](*map(arguments.get, self._names, self._values))


def on(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which kernels are launched on `device`."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)
