"""How the Triton kernels read query, key, value and gradients: in place, from a padded copy, or through descriptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .triton_configurations import block_d
from .triton_tiles import BULK

_ALIGNMENT = 16  # bytes

Four = tuple[int, int, int, int]  # batch, head, token, dim


def sizes_of(tensor: Tensor) -> Four:
    """Batch, heads, tokens, dim. Packed sequences (tokens, heads, dim) are a batch of one."""
    if tensor.dim() == 4:
        return tuple(tensor.shape)  # type: ignore[return-value]
    tokens, heads, dim = tensor.shape
    return 1, heads, tokens, dim


def strides_of(tensor: Tensor) -> Four:
    if tensor.dim() == 4:
        return tensor.stride()  # type: ignore[return-value]
    token, head, dim = tensor.stride()
    return 0, head, token, dim


def is_aligned(tensor: Tensor) -> bool:
    """Whether kernels can read the rows of `tensor` in blocks of 16 bytes."""
    step = _ALIGNMENT // tensor.element_size()
    strides = [stride for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    rows_are_dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return rows_are_dense and tensor.data_ptr() % _ALIGNMENT == 0 and not any(stride % step for stride in strides)


class Reader:
    """How kernels read the rows of tensors like one: those of a tensor itself, or of a copy padded to 16 bytes."""

    def __init__(self, tensor: Tensor, access: int) -> None:
        repeats = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        self._access, self.dtype = access, tensor.dtype
        self._copies = not is_aligned(tensor) or (repeats and access == BULK.value)
        readable = _padded(tensor, "meta") if self._copies else tensor
        self.sizes = sizes_of(readable)
        self.strides = strides_of(readable)

    def __call__(self, tensor: Tensor) -> Tensor:
        return _padded(tensor, tensor.device).copy_(tensor) if self._copies else tensor

    def tiles(self, rows: int, kind: type = TensorDescriptor, **more: Any) -> Callable[[Tensor], Any]:
        """What kernels take for a readable tensor: itself, or for bulk copies its descriptor for tiles of `rows`, with
        `more` attributes."""
        if self._access != BULK.value:
            return _itself
        step = _ALIGNMENT // self.dtype.itemsize
        strides = [stride if size > 1 else step for stride, size in zip(self.strides, self.sizes, strict=True)]
        strides[-1] = 1
        shape, block_shape = list(self.sizes), [1, 1, rows, block_d(self.sizes[3])]

        fixed = {"shape": shape, "strides": strides, "block_shape": block_shape, **more}

        def describe(tensor: Tensor) -> Any:
            descriptor: Any = object.__new__(kind)  # without its checks
            descriptor.__dict__.update(fixed, base=tensor)
            return descriptor

        return describe


def _padded(tensor: Tensor, device: torch.device | str) -> Tensor:
    """An uninitialized tensor of the same shape. Its rows are padded to blocks of 16 bytes."""
    step = _ALIGNMENT // tensor.element_size()
    head_dim = tensor.shape[-1]
    return tensor.new_empty((*tensor.shape[:-1], triton.cdiv(head_dim, step) * step), device=device)[..., :head_dim]


def _itself(tensor: Tensor) -> Tensor:
    return tensor
