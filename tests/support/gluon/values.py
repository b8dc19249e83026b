"""A Gluon kernel's numbers on a CPU: tensors, pointers, and tensor descriptors.

All floating-point numbers but float64 are float32.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language

from .memory import ProtocolError


def numpy_type(dtype: Any) -> np.dtype:
    """Of Gluon's type, or of numpy's, which tensors have."""
    return np.dtype(bool if dtype.name in ("int1", "bool") else getattr(np, dtype.name, np.float32))


def plain(value: Any) -> Any:
    if isinstance(value, Unfinished):
        raise ProtocolError(f"a product's result is read before a wait that returns it: {value.where}")
    return value.view(np.ndarray) if isinstance(value, Tensor) else value


def tensor(value: Any) -> "Tensor":
    return np.asarray(plain(value)).view(Tensor)


def scalar(value: int) -> "Tensor":
    return tensor(np.int32(value))


def narrow(result: Any, *inputs: Any) -> "Tensor":
    """With 32 bits, unless an input has 64: integers and float32 give float32."""
    result = np.asarray(result)
    narrower = {np.float64: np.float32, np.int64: np.int32}.get(result.dtype.type)
    if narrower and not any(getattr(value, "dtype", None) == result.dtype for value in inputs):
        result = result.astype(narrower)
    return result.view(Tensor)


class Tensor(np.ndarray):
    """Computes as Triton does: quotients of integers round towards zero."""

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        inputs = tuple(plain(value) for value in inputs)
        if function in QUOTIENTS and all(np.asarray(value).dtype.kind in "iu" for value in inputs):
            function = QUOTIENTS[function]
        return narrow(getattr(function, method)(*inputs, **options), *inputs)

    def to(self, dtype: Any, **_: Any) -> "Tensor":
        return tensor(plain(self).astype(numpy_type(dtype)))

    # A kernel's `a += b` gives `a` another value, and leaves the names of its old value alone.
    __iadd__, __isub__, __imul__ = np.ndarray.__add__, np.ndarray.__sub__, np.ndarray.__mul__
    __itruediv__, __ifloordiv__, __imod__ = np.ndarray.__truediv__, np.ndarray.__floordiv__, np.ndarray.__mod__
    __iand__, __ior__, __ixor__ = np.ndarray.__and__, np.ndarray.__or__, np.ndarray.__xor__


def _divide(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right


QUOTIENTS: dict[Any, Callable] = {np.floor_divide: _divide, np.remainder: np.fmod}


class Unfinished(Tensor):
    """A product's result while it is in flight. Whoever reads it is told."""

    where: str
    step: int  # of the partition's products
    result: np.ndarray

    @classmethod
    def of(cls, result: np.ndarray, where: str, step: int) -> "Unfinished":
        unfinished = np.full_like(result, np.nan).view(cls)
        unfinished.result, unfinished.where, unfinished.step = result, where, step
        return unfinished

    def __array_finalize__(self, source: Any) -> None:
        self.__dict__.update(getattr(source, "__dict__", {}))


class Pointer:
    """An address in a tensor of the host, or a tensor of addresses."""

    def __init__(self, memory: np.ndarray, offsets: Any = 0) -> None:
        self.memory, self.offsets = memory, offsets

    @classmethod
    def of(cls, value: torch.Tensor) -> "Pointer":
        """To all from the first item of a view to its last, whatever its strides."""
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        return cls(value.detach().as_strided([last + 1 if value.numel() else 0], [1]).numpy())

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, tensor(self.offsets) + more)

    def items(self, mask: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and mask in one shape."""
        offsets, chosen = np.broadcast_arrays(plain(tensor(self.offsets)), plain(True if mask is None else mask))
        used = offsets[chosen]
        if used.size and not (used.min() >= 0 and used.max() < self.memory.size):
            size = self.memory.size
            raise ProtocolError(f"a {what} outside of a tensor: items {used.min()} to {used.max()} of {size}")
        return offsets, chosen


class Descriptor:
    """A tensor as TMA sees it, from Triton's own TensorDescriptor."""

    layout = None

    def __init__(self, described: Any) -> None:
        self.tensor = described.base.detach().as_strided(described.shape, described.strides)
        self.block_shape = list(described.block_shape)
        self.dtype = getattr(language, str(self.tensor.dtype).removeprefix("torch."))
        self.block_type = SimpleNamespace(nbytes=int(np.prod(self.block_shape)) * self.tensor.element_size())

    def _places(self, coordinates: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where the tensor and a block overlap: slices of both."""
        of_tensor, of_block = [], []
        for start, size, length in zip(coordinates, self.tensor.shape, self.block_shape, strict=True):
            begin, end = (min(max(place, 0), size) for place in (start, start + length))
            of_tensor.append(slice(begin, end))
            of_block.append(slice(begin - start, end - start))
        return tuple(of_tensor), tuple(of_block)

    def block(self, coordinates: Sequence[int]) -> np.ndarray:
        """Zero outside of the tensor."""
        of_tensor, of_block = self._places(coordinates)
        block = np.zeros(self.block_shape, np.float32)
        block[of_block] = self.tensor[of_tensor].float().numpy()
        return block

    def store(self, coordinates: Sequence[int], block: np.ndarray) -> None:
        of_tensor, of_block = self._places(coordinates)
        self.tensor[of_tensor] = torch.from_numpy(block.reshape(self.block_shape)[of_block])
