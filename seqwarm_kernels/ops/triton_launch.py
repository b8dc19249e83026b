"""Compilation and launch of all Triton kernels. Imports triton."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton

from ..utils.caller_warnings import warn_caller
from . import backends

#: Whether kernels run on the CPU, in Triton's interpreter.
INTERPRETED: bool = triton.knobs.runtime.interpret

#: Tensors with this dispatch key are computed by the kernels of this process.
DISPATCH_KEY = "CPU" if INTERPRETED else "CUDA"


def kernel(function: Callable[..., None], jit: Callable[..., Any] | None = None) -> Any:
    """`triton.jit` without specialization: only constexpr arguments and dtypes cause another compilation.

    Except that AMD's compiler asks tensors whether 32 bits hold their offsets, since its buffer loads need that. A
    launch that is kept stays right: what a tensor spans, and its alignment, are the same in all calls with one key.
    """
    parameters = inspect.signature(function).parameters.values()
    fixed = [parameter for parameter in parameters if "constexpr" not in str(parameter.annotation)]
    if backends.IS_HIP:  # tensors are the parameters without an annotation
        fixed = [parameter for parameter in fixed if parameter.annotation is not inspect.Parameter.empty]
    return (jit or triton.jit)(function, do_not_specialize=[parameter.name for parameter in fixed])


class Launch:
    """Launches of a kernel in which only its first arguments change.

    To find the compiled kernel, Triton looks at every argument of a launch. Here it does so in the first one.

    Args:
        kernel: made by `kernel`.
        programs: size of the grid.
        arguments: the last ones, by name, the same in all launches, and options of the compiler.
    """

    def __init__(self, kernel: Any, programs: int, **arguments: Any) -> None:
        self._kernel = kernel
        self._grid = (programs, 1, 1)
        self._arguments = arguments
        self._constants = [arguments[name] for name in kernel.arg_names if name in arguments]
        self._run: Any = None

    def __call__(self, *changing: Any) -> None:
        """Launch with the first arguments. Tensors must keep their dtypes, and None stays None."""
        if self._run is None or self._kernel.pre_run_hooks:
            # Explicit, as in all launches: Triton announces another default of fused multiply-adds.
            compiled = self._kernel[self._grid](*changing, **self._arguments, enable_fp_fusion=True)
            self._run = compiled and compiled[self._grid]  # None in the interpreter
        else:
            self._run(*changing, *self._constants)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which kernels are launched on `device`."""
    if device.type == "cpu":
        return nullcontext()
    if backends.IS_HIP:
        _warn_not_yet_run()
    return torch.cuda.device(device)


@functools.cache
def _warn_not_yet_run() -> None:
    warn_caller("the kernels compile for AMD GPUs, but none has run yet: compare them by `seqwarm check`")
