"""Runs kernels written in Gluon for Hopper on CPU threads, which proves their barriers without a GPU.

    launch(kernel, grid, {"query": TensorDescriptor.from_tensor(query, [64, 128]), "Out": out, "scale": 0.5, "D": 128})

A kernel's functions run as they are written, with other globals: `gl`, `mbarrier`, `tma` and the like are this
package's, and so are other jit functions. Programs run one after another. A seed chooses their order, and in which
order partitions and copies go on. Whatever the order, what touches shared memory must have waited for the accesses
before it (memory.py). Not looked at: layouts, the order of loads and stores in global memory, and the fence after
`init`. Floating-point numbers are float32.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import triton
from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia import hopper
from triton.language.core import constexpr, is_builtin
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from .machine import Machine
from .memory import EMULATED, ProtocolError
from .operations import BARRIERS, COPIES, LANGUAGE, PRODUCTS
from .values import Descriptor, Pointer, Tensor, scalar, tensor

__all__ = ["ProtocolError", "launch"]


def launch(kernel: Any, grid: Sequence[int], arguments: Mapping[str, Any], *, seed: int = 0) -> None:
    """Run all programs of a grid. The kernel's stores reach the arguments.

    Args:
        kernel: a function under `gluon.jit`.
        grid: the programs along each axis.
        arguments: by name: CPU tensors for pointers, Triton's TensorDescriptor, numbers, None, and anything where the
            kernel says `gl.constexpr`.
        seed: of the schedule.
    """
    given = {name: _argument(value, kernel.fn.__annotations__.get(name, "")) for name, value in arguments.items()}
    _with_other_globals.cache_clear()
    machine = Machine.current = Machine((*grid, 1, 1)[:3], seed)
    programs = list(itertools.product(*map(range, machine.grid)))
    machine.random.shuffle(programs)
    with np.errstate(all="ignore"):
        for program in programs:
            try:
                machine.run(program, _emulated(kernel), given)
            except ProtocolError as error:
                raise ProtocolError(f"program {program}: {error}") from error


def _argument(value: Any, annotation: str) -> Any:
    """Each number has an annotation, such as tl.int64."""
    kind = annotation.rpartition(".")[2]
    if kind == "constexpr":
        return _emulated(value)
    if isinstance(value, torch.Tensor):
        return Pointer.of(value)
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    return tensor(value).to(getattr(language, kind)) if kind else value


# ---- a kernel's functions with other globals


class Module:
    """A module, as a kernel sees it: with emulated functions."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _emulated(getattr(self._module, name))


def _emulated(value: Any) -> Any:
    if isinstance(value, constexpr):
        return value.value
    if isinstance(value, ModuleType):
        return Module(value)
    if id(value) in _replaced:
        return _replaced[id(value)]
    if isinstance(value, (JITFunction, InterpretedFunction)):
        return _with_other_globals(value.fn)
    if is_builtin(value):
        raise NotImplementedError(f"tests/support/gluon does not emulate {value.__name__}")
    return value


@functools.cache
def _with_other_globals(function: FunctionType) -> FunctionType:
    variables = _Globals(function.__globals__)
    emulated = FunctionType(
        function.__code__, variables, function.__name__, function.__defaults__, function.__closure__
    )
    emulated.__kwdefaults__ = function.__kwdefaults__
    return emulated


def _loop(*limits: Any) -> Iterator[Tensor]:
    """The counter of a loop that is not unrolled is a tensor."""
    return map(scalar, range(*map(int, limits)))


class _Globals(dict):
    """Global variables, emulated when a kernel looks at them."""

    def __init__(self, variables: dict[str, Any]) -> None:
        super().__init__({EMULATED: True, "range": _loop, "__builtins__": variables["__builtins__"]})
        self.variables = variables

    def __missing__(self, name: str) -> Any:
        return self.setdefault(name, _emulated(self.variables[name]))


#: By the address of the real function or class, what kernels call instead.
_replaced: dict[int, Any] = {}
for _module, _functions in (
    *((triton.language, LANGUAGE), (language, LANGUAGE)),
    *((hopper, PRODUCTS), (hopper.mbarrier, BARRIERS), (hopper.tma, COPIES)),
):
    _replaced |= {id(getattr(_module, name)): new for name, new in _functions.items() if hasattr(_module, name)}
