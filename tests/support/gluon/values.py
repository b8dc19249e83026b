"""A Gluon kernel's numbers on a CPU: tensors, pointers, tensor descriptors, and the functions that need no machine.

All floating-point numbers but float64 are float32.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as real

from .memory import Flight, ProtocolError

NUMPY_TYPES = {"int1": np.bool_, "float64": np.float64} | {
    name: getattr(np, name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}


def numpy_type(dtype: Any) -> np.dtype:
    """Of Gluon's type, or of numpy's, which tensors have."""
    return np.dtype(NUMPY_TYPES.get(dtype.name, np.float32))


def plain(value: Any) -> Any:
    if isinstance(value, Unfinished):
        raise ProtocolError(f"a product's result is read before a wait that returns it: {value.flight.where}")
    return value.view(np.ndarray) if isinstance(value, Tensor) else value


def tensor(value: Any) -> "Tensor":
    return np.asarray(plain(value)).view(Tensor)


def scalar(value: Any) -> Any:
    """An argument as kernels get it."""
    if isinstance(value, (bool, np.bool_)):
        return tensor(np.bool_(value))
    if isinstance(value, (int, np.integer)):
        return tensor(np.int32(value) if -(2**31) <= value < 2**31 else np.int64(value))
    return tensor(np.float32(value))


class Tensor(np.ndarray):
    """Computes as Triton does: integers and float32 give float32, and quotients of integers round towards zero."""

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        inputs = tuple(plain(value) for value in inputs)
        if function in QUOTIENTS and all(np.asarray(value).dtype.kind in "iu" for value in inputs):
            function = QUOTIENTS[function]
        result = np.asarray(getattr(function, method)(*inputs, **options))
        if result.dtype == np.float64 and not any(getattr(value, "dtype", None) == np.float64 for value in inputs):
            result = result.astype(np.float32)
        return result.view(Tensor)

    def to(self, dtype: Any, **_: Any) -> "Tensor":
        return tensor(plain(self).astype(numpy_type(dtype)))

    # A kernel's `a += b` gives `a` another value, and leaves the names of its old value alone.
    __iadd__, __isub__, __imul__ = np.ndarray.__add__, np.ndarray.__sub__, np.ndarray.__mul__
    __itruediv__, __ifloordiv__, __imod__ = np.ndarray.__truediv__, np.ndarray.__floordiv__, np.ndarray.__mod__
    __iand__, __ior__, __ixor__ = np.ndarray.__and__, np.ndarray.__or__, np.ndarray.__xor__


def _divide(left: Any, right: Any) -> Any:
    quotient, rest = np.divmod(left, right)
    return quotient + ((rest != 0) & ((np.asarray(left) < 0) != (np.asarray(right) < 0)))


QUOTIENTS: dict[Any, Callable] = {np.floor_divide: _divide, np.remainder: np.fmod}


class Unfinished(Tensor):
    """A product's result while it is in flight. Whoever reads it is told."""

    flight: Flight
    result: np.ndarray

    @classmethod
    def of(cls, result: np.ndarray, flight: Flight) -> "Unfinished":
        unfinished = np.full_like(result, np.nan).view(cls)
        unfinished.result, unfinished.flight = result, flight
        return unfinished

    def __array_finalize__(self, source: Any) -> None:
        self.__dict__.update(getattr(source, "__dict__", {}))


class Pointer:
    """An address in a tensor of the host, or a tensor of addresses."""

    def __init__(self, memory: np.ndarray, offsets: Any = 0) -> None:
        self.memory, self.offsets = memory, offsets

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, tensor(self.offsets) + more)

    __radd__ = __add__

    def items(self, mask: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and mask in one shape."""
        offsets, chosen = np.broadcast_arrays(plain(tensor(self.offsets)), plain(True if mask is None else mask))
        used = offsets[chosen]
        if used.size and not (used.min() >= 0 and used.max() < self.memory.size):
            size = self.memory.size
            raise ProtocolError(f"a {what} outside of a tensor: items {used.min()} to {used.max()} of {size}")
        return offsets, chosen


def memory_of(values: np.ndarray) -> np.ndarray:
    """From the first item of a view to its last, whatever its strides."""
    if values.size == 0:
        return values.reshape(-1)
    last = sum((size - 1) * stride for size, stride in zip(values.shape, values.strides, strict=True))
    return np.lib.stride_tricks.as_strided(values, [last // values.itemsize + 1], [values.itemsize])


class Descriptor:
    """A tensor as TMA sees it. `dtype` is what the kernel reads, also where the values are float32 here."""

    layout = None

    def __init__(self, values: np.ndarray, block_shape: Sequence[int], dtype: Any) -> None:
        self.values, self.shape, self.block_shape, self.dtype = values, list(values.shape), list(block_shape), dtype
        nbytes = int(np.prod(self.block_shape)) * self.dtype.primitive_bitwidth // 8
        self.block_type = SimpleNamespace(nbytes=nbytes)

    def _places(self, coordinates: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where the tensor and a block overlap: slices of both."""
        inside, of_block = [], []
        for start, size, length in zip(map(int, coordinates), self.shape, self.block_shape, strict=True):
            begin, end = max(start, 0), min(start + length, size)
            end = max(begin, end)
            inside.append(slice(begin, end))
            of_block.append(slice(begin - start, end - start))
        return tuple(inside), tuple(of_block)

    def block(self, coordinates: Sequence[Any]) -> np.ndarray:
        """Zero outside of the tensor."""
        inside, of_block = self._places(coordinates)
        block = np.zeros(self.block_shape, self.values.dtype)
        if all(part.start < part.stop for part in inside):
            block[of_block] = self.values[inside]
        return block

    def store(self, coordinates: Sequence[Any], block: np.ndarray) -> None:
        inside, of_block = self._places(coordinates)
        if all(part.start < part.stop for part in inside):
            self.values[inside] = block.reshape(self.block_shape)[of_block]


class Host:
    """A launch's arguments. Tensors of numpy's types share memory, others are copied."""

    def __init__(self) -> None:
        self.copies: dict[int, tuple[torch.Tensor, np.ndarray]] = {}

    def argument(self, value: Any) -> Any:
        """As kernels get it, if it is no constexpr."""
        if isinstance(value, torch.Tensor):
            return Pointer(memory_of(self._array(value)))
        if isinstance(value, (bool, int, float, np.generic)):
            return scalar(value)
        if isinstance(value, tuple):
            items = [self.argument(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if hasattr(value, "block_shape") and hasattr(value, "base"):  # Triton's own TensorDescriptor
            array = self._array(value.base.as_strided(value.shape, value.strides))
            return Descriptor(array, value.block_shape, _type_of(value.base))
        return value

    def _array(self, value: torch.Tensor) -> np.ndarray:
        value = value.detach()
        if value.dtype not in (torch.float16, torch.bfloat16):
            return value.numpy()
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        if value.data_ptr() not in self.copies or self.copies[value.data_ptr()][0].numel() <= last:
            flat = value.as_strided([last + 1], [1])
            self.copies[value.data_ptr()] = flat, flat.float().numpy()
        strides = [4 * stride for stride in value.stride()]
        return np.lib.stride_tricks.as_strided(self.copies[value.data_ptr()][1], value.shape, strides)

    def write_back(self) -> None:
        for flat, copy in self.copies.values():
            flat.copy_(torch.from_numpy(copy))


def _type_of(value: torch.Tensor) -> Any:
    return getattr(real, {torch.bool: "int1"}.get(value.dtype, str(value.dtype).removeprefix("torch.")))
