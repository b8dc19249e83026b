"""Checks of arguments, states and optional packages."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

#: All ints up to this are exact in JSON and as floats.
MAX_COUNT = 2**53


def check_int(name: str, value: object, *, minimum: int | None = None) -> int:
    """Return `value` as an int. It must be an int of Python or NumPy (not a bool) of 64 bits, at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool):
        wrong = TypeError(f"{name} must be an int, got {type(value).__name__}")
        if isinstance(value, (bool, Tensor)):
            raise wrong
        try:
            value = operator.index(value)  # type: ignore[arg-type]  # NumPy's ints
        except TypeError:
            raise wrong from None
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit into 64 bits, got an int of {value.bit_length()} bits")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return value


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """`value` must be one of `choices`. What is not a str is not compared: arrays compare item by item."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_real(name: str, value: object) -> float:
    """Return `value` as an int or float. It must be a finite real number of Python or NumPy (not a bool)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}")
    value = value if isinstance(value, int) else float(value)  # NumPy's float64 is a float, too
    # torch.compile cannot trace math.isfinite of a dynamic number. An int may be too large for a float.
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise ValueError(f"{name} must be finite, got {value if isinstance(value, float) else 'a larger int'}")
    return value


def check_share(name: str, value: object) -> None:
    """`value` must be a number in [0, 1)."""
    check_real(name, value)
    if not 0 <= value < 1:  # type: ignore[operator]
        raise ValueError(f"{name} must be in [0, 1), got {value}")


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_path(name: str, value: object) -> Path:
    """Return `value` as a Path. It must be a str or a path object, not bytes."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError(f"{name} must be a path, got {type(value).__name__}")
    return Path(path)


def check_dense(name: str, tensor: Tensor) -> None:
    """`tensor` must be strided and not nested."""
    if tensor.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")


def check_values(condition: Tensor, message: str) -> None:
    """Raise ValueError where the condition is False. Not on a CPU, or in compiled code, the device raises it."""
    if condition.is_cpu and not torch.compiler.is_compiling():
        if not condition:
            raise ValueError(message)
    else:
        torch._assert_async(condition, message)  # private, and the only check for which the host does not wait


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward-mode differentiation passes through `tensor`."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def check_no_tangent(name: str, tensor: Tensor) -> None:
    """Operators return results without tangents, which would count as zero."""
    if has_tangent(tensor):
        raise ValueError(f"{name} must have no tangent, got a dual tensor: only reverse mode is supported")


def is_dtensor(value: object) -> bool:
    """Whether `value` is a DTensor. Does not load torch.distributed.tensor: without it there are none."""
    if not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter):
        return False  # before sys.modules, which torch.compile could not trace while another thread imports
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(value, loaded.DTensor)


def check_rank(rank: object, world_size: object) -> None:
    """`rank` must be an int in [0, `world_size`)."""
    check_int("world_size", world_size, minimum=1)
    check_int("rank", rank, minimum=0)
    if rank >= world_size:  # type: ignore[operator]
        raise ValueError(f"rank must be below world_size {world_size}, got {rank}")


def check_state_entries(state_dict: object, expected: Collection[str]) -> None:
    """`state_dict` must be a mapping with exactly the `expected` entries."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping, got {type(state_dict).__name__}")
    if state_dict.keys() != set(expected):
        raise ValueError(f"state_dict must have the entries {list(expected)}, got {list(state_dict)}")


def check_same_configuration(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, source: str = "state_dict"
) -> None:
    """All settings saved in `source` must equal the current ones. The error names the first that differs."""
    for name in {**current, **saved}:
        if name not in saved or name not in current or saved[name] != current[name]:
            was, now = (repr(settings[name]) if name in settings else "unknown" for settings in (saved, current))
            raise ValueError(f"{source} is of another configuration: {name} is {was} in the state, {now} here")


def check_matplotlib() -> None:
    """matplotlib must be installed. The error says how to install it."""
    with needs("figures need matplotlib", "seqwarm_kernels[demo]"):
        import matplotlib  # noqa: F401


@contextmanager
def needs(need: str, package: str) -> Iterator[None]:
    """An ImportError in the block says what is needed, and that pip installs it with `package`."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f'{need}: pip install "{package}" (the import failed: {error})') from error
