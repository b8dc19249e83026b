"""Functions of the language that need no machine."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .memory import poison
from .values import Pointer, Tensor, narrow, numpy_type, plain, tensor


def full(shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return tensor(np.full(shape, plain(value), numpy_type(dtype)))


def where(condition: Any, left: Any, right: Any) -> Tensor:
    condition, left, right = map(plain, (condition, left, right))
    return narrow(np.where(condition, left, right), left, right)


def arange(start: int, end: int, layout: Any = None) -> Tensor:
    return tensor(np.arange(start, end, dtype=np.int32))


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Tensor:
    """NaN, or a large number, where the mask is False and `other` is not given: a GPU may give anything there."""
    offsets, chosen = pointer.items(mask, "load")
    loaded = np.empty(offsets.shape, pointer.memory.dtype)
    if other is None:
        poison(loaded)
    else:
        loaded[...] = plain(other)
    loaded[chosen] = pointer.memory[offsets[chosen]]
    return tensor(loaded)


def store(pointer: Pointer, value: Any, mask: Any = None) -> np.ndarray:
    """Returns the items that it stored."""
    offsets, chosen = pointer.items(mask, "store")
    pointer.memory[offsets[chosen]] = np.broadcast_to(plain(value), offsets.shape)[chosen]
    return offsets[chosen]


def atomic_add(pointer: Pointer, value: Any) -> Tensor:
    """Of one number."""
    before = load(pointer)
    store(pointer, before + value)
    return before


def fma(left: Any, right: Any, added: Any) -> Tensor:
    """Rounds once, nearly: float64 holds a product of two float32, and rounds a sum far below them."""
    left, right, added = (np.asarray(plain(value), np.float64) for value in (left, right, added))
    return tensor((left * right + added).astype(np.float32))


def static_assert(condition: Any, message: str) -> None:
    assert condition, message


def _each(function: np.ufunc) -> Callable[..., Tensor]:
    return lambda *values: function(*map(tensor, values))


def _along(function: np.ufunc) -> Callable[..., Tensor]:
    return lambda value, axis: tensor(function.reduce(plain(value), axis, dtype=value.dtype))


FUNCTIONS: dict[str, Any] = {
    "constexpr": lambda value: value, "convert_layout": lambda value, layout: value, "num_warps": lambda: 4,
    "static_range": range, "static_assert": static_assert,
    "arange": arange, "full": full, "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype),
    "expand_dims": np.expand_dims, "where": where, "load": load, "fma": fma, "atomic_add": atomic_add,
    "cdiv": lambda left, right: (left + right - 1) // right,
    "abs": _each(np.abs), "exp2": _each(np.exp2), "log2": _each(np.log2), "sqrt": _each(np.sqrt),
    "ceil": _each(np.ceil), "sum": _along(np.add),
    # Of NaN and a number, both take the number.
    "maximum": _each(np.fmax), "minimum": _each(np.fmin), "max": _along(np.fmax), "min": _along(np.fmin),
}  # fmt: skip
