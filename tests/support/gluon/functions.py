"""Functions of the language that need no machine."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .memory import poison
from .values import Pointer, Tensor, numpy_type, plain, tensor


def full(shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return tensor(np.full(shape, plain(value), numpy_type(dtype)))


def where(condition: Any, left: Any, right: Any) -> Tensor:
    condition, left, right = (plain(value) for value in (condition, left, right))
    result = np.where(condition, left, right)
    kinds = [value.dtype for value in (left, right) if isinstance(value, np.ndarray)]
    if result.dtype in (np.float64, np.int64) and result.dtype not in kinds:
        result = result.astype(np.float32 if result.dtype.kind == "f" else np.int32)
    return tensor(result)


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


def atomic_add(pointer: Pointer, value: Any, mask: Any = None) -> Tensor:
    before = load(pointer, mask)
    offsets, chosen = pointer.items(mask, "store")
    np.add.at(pointer.memory, offsets[chosen], np.broadcast_to(plain(value), offsets.shape)[chosen])
    return before


def fma(left: Any, right: Any, added: Any) -> Tensor:
    """Rounds once, nearly: float64 holds a product of two float32, and rounds a sum far below them."""
    left, right, added = (np.asarray(plain(value), np.float64) for value in (left, right, added))
    return tensor((left * right + added).astype(np.float32))


def static_assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise AssertionError(message or "static_assert")


def _each(function: np.ufunc) -> Callable[..., Tensor]:
    return lambda *values: tensor(values[0]).__array_ufunc__(function, "__call__", *values)


def _along(function: np.ufunc) -> Callable[..., Tensor]:
    return lambda value, axis: tensor(function.reduce(plain(value), axis, dtype=value.dtype))


def _same(value: Any, *_: Any) -> Any:
    return value


FUNCTIONS: dict[str, Any] = {
    "constexpr": _same, "convert_layout": _same, "static_range": range, "static_assert": static_assert,
    "num_warps": lambda: 4,
    "arange": arange, "full": full, "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype),
    "expand_dims": np.expand_dims, "where": where, "load": load, "fma": fma, "atomic_add": atomic_add,
    "cdiv": lambda left, right: (left + right - 1) // right,
    "abs": _each(np.abs), "exp2": _each(np.exp2), "log2": _each(np.log2), "sqrt": _each(np.sqrt),
    "ceil": _each(np.ceil), "sum": _along(np.add),
    # Of NaN and a number, both take the number.
    "maximum": _each(np.fmax), "minimum": _each(np.fmin), "max": _along(np.fmax), "min": _along(np.fmin),
}  # fmt: skip
