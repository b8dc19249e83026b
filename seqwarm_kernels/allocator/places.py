"""Where the elements of a tensor are, and a way back after `resize_`, `set_` or an assignment to `data`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class _Layout(NamedTuple):
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class Place:
    """Shape, strides, storage, dtype and device of a strided tensor. `restore` leaves open what the tensor contains."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.layout = _layout_of(tensor)
        self.storage, self.bytes = _storage_of(tensor)

    def restore(self) -> None:
        """Undo changes of the shape. The storage never shrinks, since other tensors may use the rest of it."""
        storage, size = _storage_of(self.tensor)
        if _layout_of(self.tensor) == self.layout and size >= self.bytes:
            return
        shape, strides, offset, dtype, device = self.layout
        if storage != self.storage or self.tensor.dtype != dtype:  # may be that of another tensor
            self.tensor.data = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            return
        held = self.tensor.untyped_storage()
        if size < self.bytes:
            held.resize_(self.bytes)
        self.tensor.set_(held, offset, shape, strides)


def _layout_of(tensor: Tensor) -> _Layout:
    return _Layout(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.device)


def _storage_of(tensor: Tensor) -> tuple[int, int]:
    """The address of the storage object, which stays when the storage is resized, and its size in bytes."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()
