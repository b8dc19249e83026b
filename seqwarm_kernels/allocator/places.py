"""Where the elements of a tensor are, and a way back after `resize_`, `set_` or an assignment to `data`."""

from __future__ import annotations

import torch
from torch import Tensor


class Place:
    """Shape, strides, storage and dtype of a strided tensor. `restore` leaves open what the tensor contains.

    The storage is kept until the place is: another could get its address, and other tensors may lie in it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        with torch._C.DisableTorchFunctionSubclass():
            self.before = tensor.detach()
            self.bytes = self.before.untyped_storage().nbytes()

    def restore(self) -> None:
        """Lay the tensor where it was. The storage never shrinks, since other tensors may use the rest of it."""
        with torch._C.DisableTorchFunctionSubclass():
            storage = self.before.untyped_storage()
            if storage.nbytes() < self.bytes:
                storage.resize_(self.bytes)
            if not _lie_alike(self.tensor, self.before):
                self.tensor.data = self.before  # unlike `set_`, also the dtype, and of inference tensors


def has_place(tensor: Tensor) -> bool:
    """Return False for sparse and nested tensors and for classes that may keep their elements in other tensors."""
    is_own = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return is_own and tensor.layout == torch.strided and not tensor.is_nested


def _lie_alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same elements, in the same memory."""
    return (
        tensor.untyped_storage() is other.untyped_storage()
        and tensor.storage_offset() == other.storage_offset()
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.dtype == other.dtype
        and tensor.is_conj() == other.is_conj()
        and tensor.is_neg() == other.is_neg()
    )
