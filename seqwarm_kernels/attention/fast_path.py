"""Runs calls of attention. A call whose key is known skips checks, defaults, and the Python parts of the dispatcher.

A model makes the same call in each layer and step. On an AMD EPYC (Zen 4), torch 2.13, one thread, one row of one token
with 12 heads takes 8.3 µs if its key is known, else 36 µs; scaled_dot_product_attention takes 6.7 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled  # torch.is_autocast_enabled asks for one type of device

from ..ops.alibi_attention.schema import FARTHEST_POSITION, DenseOptions
from ..ops.call_key import CallCache, call_key
from ..ops.library import short
from ..utils.devices import is_capturing
from .calls import (
    Defaults,
    DenseCall,
    VarlenCall,
    cast_for_autocast,
    check_dense,
    check_varlen,
    complete_dense,
    complete_varlen,
)
from .context_parallel import refuse_context_parallel


class _CheckedCall(NamedTuple):
    """A checked call, reused for every call with the same key."""

    run: Callable[..., tuple[Tensor, ...]]
    defaults: Defaults


_checked_calls: CallCache[_CheckedCall] = CallCache()


def attend(call_type: type[DenseCall] | type[VarlenCall], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Check and run a call.

    Args:
        call_type: `DenseCall` or `VarlenCall`.
        arguments: Its fields. A plain tuple, since making a NamedTuple takes 5 % of a short call.

    Returns:
        out, lse, and perhaps more.
    """
    is_compiling = torch.compiler.is_compiling()
    refuse_context_parallel(is_compiling)
    key = None
    if not is_compiling:
        if _is_any_autocast_enabled():
            arguments = cast_for_autocast(arguments)
        key = _key(arguments)
        checked = _checked_calls.get(key)
        if checked is not None:
            complete = complete_dense if call_type is DenseCall else complete_varlen
            return checked.run(*complete(arguments, checked.defaults))
    call = call_type(*arguments)
    operator, tensors, options = check_dense(call) if isinstance(call, DenseCall) else check_varlen(call)
    if key is None or is_capturing(call.query.device):  # a captured graph owns the default slopes
        return operator(*tensors, *options)
    run = short(operator._schema.name.removeprefix("seqwarm::"), operator._overloadname)
    slopes = tensors[3] if call.slopes is None else None  # the caller's tensors are not kept
    default_start = options.query_offset if isinstance(options, DenseOptions) else 0
    _checked_calls.remember(key, _CheckedCall(run, Defaults(slopes, options.scale, default_start)))
    return run(*tensors, *options)


def _key(arguments: tuple[Any, ...]) -> Hashable | None:
    """The cache key. It leaves out the value of an int `query_start`, which changes with every decoding step."""
    start = arguments[-1]
    has_position = type(start) is int and abs(start) <= FARTHEST_POSITION
    return call_key(*(arguments[:-1] if has_position else arguments))
