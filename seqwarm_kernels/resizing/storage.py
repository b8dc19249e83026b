"""Memory of the caller to which resized tensors are written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..utils.checks import is_dtensor


def check_storage(
    name: str, out: Mapping[str, Tensor], source: Tensor, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """The first elements of out[name] as a contiguous tensor of `shape`. Checks dtype and device of the storage."""
    storage = out.get(name)
    if not isinstance(storage, Tensor):
        raise ValueError(f"out must hold a tensor {name!r} to write to, its names are {list(out)}")
    if storage.dtype != source.dtype or storage.device != device:
        raise ValueError(
            f"out[{name!r}] must be {source.dtype} on {device}, got {storage.dtype} on {storage.device}"
            + ("; BatchBuffers read batches in pinned host memory" if storage.is_cuda else "")
        )
    return first_elements(f"out[{name!r}]", storage, shape)


def first_elements(name: str, storage: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first elements of a contiguous tensor, as `shape`."""
    needed = torch.Size(shape).numel()
    if not storage.is_contiguous() or storage.numel() < needed:
        raise ValueError(
            f"{name} must be contiguous with at least {needed} elements for {tuple(shape)}, "
            f"got {storage.numel()}{'' if storage.is_contiguous() else ', not contiguous'}"
        )
    return storage.view(-1)[:needed].view(shape)


def check_no_overlap(carved: Mapping[str, Tensor], batch: Mapping[str, object]) -> None:
    """No output may share memory with an entry of the batch or with another output."""
    spans = [(f"out[{name!r}]", _span(tensor)) for name, tensor in carved.items()]
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    strided = {
        name: tensor for name, tensor in tensors.items() if tensor.layout == torch.strided and not is_dtensor(tensor)
    }
    inputs = [(f"batch[{name!r}]", _span(tensor)) for name, tensor in strided.items()]
    for index, (name, (start, stop)) in enumerate(spans):
        for other, (other_start, other_stop) in spans[:index] + inputs:
            if start < other_stop and other_start < stop:
                raise ValueError(f"{name} must not share memory with {other}")


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses from the first to past the last element of a tensor."""
    if tensor.numel() == 0:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
