"""Cache key of a call. Calls with equal keys need the same checks and run the same kernel."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..utils.checks import has_tangent
from . import backends

_ALIGNMENT = 16  # bytes: of blocks that kernels may load at once
_MAX_KEYS = 256

_Call = TypeVar("_Call")


class CallCache(dict[Hashable, _Call]):
    """Calls by their key. A training run has few. Where lengths grow with each call, old ones are dropped."""

    def remember(self, key: Hashable, call: _Call) -> None:
        if key is None:
            return
        if len(self) >= _MAX_KEYS:
            self.clear()
        self[key] = call


def _call_key(*arguments: Any) -> Hashable | None:
    """The key of a call with these arguments, or None; without the module for this torch.

    Of tensors: shape, strides, dtype, device and alignment. Of None, bool, int, float and str: type and value. Other
    arguments have no key, nor have tensors that are not plain (a subclass, a dual tensor, inside of a functorch
    transform), nor calls while a mode of PyTorch could change what they do.
    """
    if not _is_plain_state():
        return None
    key: list[Any] = []
    for argument in arguments:
        if type(argument) in (Tensor, torch.nn.Parameter):
            if argument.layout != torch.strided or argument.is_nested or argument.device.type not in ("cpu", "cuda"):
                return None
            if argument.is_conj() or argument.is_neg() or has_tangent(argument):
                return None
            aligned = argument.data_ptr() % _ALIGNMENT == 0
            key += argument.shape, argument.stride(), argument.dtype, argument.device, aligned
        elif argument is None:
            key.append(argument)
        elif type(argument) is float:
            key.append(argument.hex())  # distinguishes 0.0 from -0.0
        elif type(argument) in (bool, int, str):
            key += type(argument), argument
        else:
            return None
    return tuple(key)


def is_readable(*tensors: Tensor) -> bool:
    """Whether the host can read values without waiting: of plain tensors on a CPU, outside of traces and modes."""
    if torch.compiler.is_compiling() or any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    return call_key(*tensors) is not None


def _is_plain_state() -> bool:
    """Whether no dispatch or torch-function mode, tracing or functorch transform is active. Autocast may be."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


call_key = _call_key if backends.module is None else backends.module.call_key
