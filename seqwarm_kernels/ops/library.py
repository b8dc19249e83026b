"""The `seqwarm` operator library: one schema for each operator, one overload for each of its implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("seqwarm", "DEF")

_short: dict[tuple[str, str], Callable[..., tuple[Tensor, ...]]] = {}


def define(operator: str, signature: str, backends: tuple[str, ...], *, fake: Callable[..., Any]) -> None:
    """Register `seqwarm::operator.<backend>` for every backend, with one signature and one fake.

    No tag is set. No argument may be called `mode`: torch's functionalization of mutable operators passes arguments
    by name and has a parameter of that name itself.
    """
    for backend in backends:
        LIBRARY.define(f"{operator}.{backend}{signature}")
        torch.library.register_fake(f"seqwarm::{operator}.{backend}", fake, lib=LIBRARY)


def implement(operator: str, backend: str, function: Callable[..., Any]) -> None:
    """Register a Python implementation for every device."""
    LIBRARY.impl(f"{operator}.{backend}", function, "CompositeExplicitAutograd")


def overload(operator: str, backend: str) -> torch._ops.OpOverload:
    """The callable `torch.ops.seqwarm.<operator>.<backend>`."""
    return getattr(getattr(torch.ops.seqwarm, operator), backend)


def differentiable(
    operator: str, backend: str, backward: Callable[..., Any], setup_context: Callable[..., Any]
) -> None:
    """Register the backward of an operator with autograd."""
    name = f"seqwarm::{operator}.{backend}"
    torch.library.register_autograd(name, backward, setup_context=setup_context, lib=LIBRARY)


def shorten(operator: str, backend: str, function: Callable[..., tuple[Tensor, ...]]) -> None:
    """Register a shorter way to the kernels of an overload, past the Python parts of the dispatcher."""
    _short[operator, backend] = function


def short(operator: str, backend: str) -> Callable[..., tuple[Tensor, ...]]:
    """A function of the overload's arguments that returns at least its first two outputs, differentiable.

    Only for arguments that have a key (`call_key`).
    """
    return _short.get((operator, backend)) or overload(operator, backend)
