"""Calls with one argument replaced by values that make no sense: taken, or refused by name with nothing changed."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

#: Values that make no sense for most arguments.
JUNK = [
    None,
    object(),
    b"x",
    "x",
    -1,
    2.5,
    math.nan,
    10**30,
    10**400,
    [],
    {},
    True,
    [object()],
    np.array([object()]),
    torch.tensor(5),
    torch.tensor([1.0, math.nan]),
    torch.eye(2).to_sparse(),
    torch.ones(1, device="meta"),
]


def complaints(call, make, argument, junk_values=JUNK):
    """What is wrong with calls whose `argument` is junk, as a list of texts.

    Args:
        call: The function.
        make: Makes valid arguments, anew for each call, as a dict.
    """
    found = []
    for junk in junk_values:
        valid = make()
        before = _frozen(valid)
        try:
            call(**{**valid, argument: junk})
        except (TypeError, ValueError) as error:
            if not re.search(rf"(\b|_){argument.removeprefix('example_').removesuffix('s')}s?\b", str(error)):
                found.append(f"{argument}={junk!r}: the error does not name it: {error!r}")
            if _frozen(valid) != before:
                found.append(f"{argument}={junk!r}: other arguments were changed before {error!r}")
        except Exception as error:
            found.append(f"{argument}={junk!r}: {error!r}")
        else:
            if must_fail(valid[argument], junk, _default(call, argument)):
                found.append(f"{argument}={junk!r} was taken")
    return found


def check_all_arguments(call, make):
    """`call` takes the valid arguments that `make` returns, and refuses junk in each by its name."""
    call(**make())
    found = [text for argument in make() for text in complaints(call, make, argument)]
    assert not found, "\n".join(found)


def check_accepted_or_named(name, call):
    """`call` accepts each value, or raises a TypeError or ValueError that names the argument."""
    found = complaints(lambda **arguments: call(arguments[name]), lambda: {name: None}, name)
    assert not found, "\n".join(found)


def must_fail(valid, junk, default):
    """Whether `junk` is surely wrong where `valid` is right and `default` is the parameter's default."""
    if junk is None:
        return default is not None and valid is not None
    if isinstance(valid, bool):
        return not isinstance(junk, bool)
    if isinstance(valid, int):
        return not isinstance(junk, int) or isinstance(junk, bool)
    if isinstance(valid, float):
        return not isinstance(junk, int | float) or isinstance(junk, bool)
    if isinstance(valid, str):
        return not isinstance(junk, str)
    if isinstance(valid, Tensor):
        return not isinstance(junk, Tensor) or junk.is_sparse
    if isinstance(valid, Mapping):
        return not isinstance(junk, Mapping)
    if isinstance(valid, Sequence):
        return not isinstance(junk, Iterable)
    if isinstance(valid, Path):
        return not isinstance(junk, str | bytes)
    return valid is not None


def _default(call, name):
    parameter = inspect.signature(call).parameters.get(name)
    return None if parameter is None else parameter.default


def _frozen(value):
    """`value` with everything in it that a call could change, comparable by ==."""
    if isinstance(value, Tensor):
        if value.is_sparse or value.is_meta:
            return repr(value)
        return value.dtype, tuple(value.shape), value.detach().cpu().numpy().tobytes()
    if isinstance(value, nn.Module):
        parts = [(name, type(module), module.training) for name, module in value.named_modules()]
        return parts, _frozen(value.state_dict()), [parameter.grad is None for parameter in value.parameters()]
    if isinstance(value, Mapping):
        return {key: _frozen(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_frozen(entry) for entry in value]
    if hasattr(value, "state_dict") and not isinstance(value, type):
        return _frozen(value.state_dict())
    return value if isinstance(value, int | float | str | Callable) else type(value)
