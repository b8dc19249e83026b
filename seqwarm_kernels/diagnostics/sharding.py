"""The part of a tensor that this rank holds, and the exchange of statistics with ranks that hold other parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class ShardLocation(NamedTuple):
    """The device of a tensor, and the ranks that it is sharded over."""

    device: torch.device
    mesh: Any = None  #: a torch.distributed.DeviceMesh; None for a plain tensor
    shard_dims: tuple[int, ...] = ()  #: mesh dimensions along which other ranks hold other parts


class LocalPart(NamedTuple):
    """The part of a tensor that this rank holds."""

    location: ShardLocation
    tensor: Tensor  #: dense
    is_copy: bool  #: whether `tensor` is temporary, not the optimizer's own memory


def local_part(tensor: Tensor, *, is_copy: bool = False) -> LocalPart:
    """This rank's part of a tensor, as a dense floating-point tensor. `is_copy` marks a tensor that is temporary.

    Raises:
        ValueError: the tensor is a DTensor whose ranks hold summands instead of parts.
    """
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        if tensor.layout == torch.strided:
            return LocalPart(ShardLocation(tensor.device), tensor, is_copy)
        return LocalPart(ShardLocation(tensor.device), tensor.coalesce().values(), True)
    mesh: Any = None
    shard_dims: tuple[int, ...] = ()
    if hasattr(tensor, "device_mesh"):
        mesh, shard_dims = tensor.device_mesh, _shard_dims(tensor)
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    # A subclass with its own dequantize holds quantized numbers, as torchao's OptimState8bit does.
    is_copy = type(tensor).dequantize is not Tensor.dequantize
    if is_copy:
        tensor = tensor.dequantize()
    return LocalPart(ShardLocation(tensor.device, mesh, shard_dims), tensor, is_copy)


def _shard_dims(tensor: Any) -> tuple[int, ...]:
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"a DTensor must be sharded or replicated, got {tensor.placements}: sum it over its ranks first"
        )
    return tuple(dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())


def gather_over_ranks(statistics: Tensor, location: ShardLocation) -> Tensor:
    """From this rank's statistics (N,) to those of all ranks that hold parts (R, N), in the same order on each rank."""
    parts = statistics[None]
    for dim in location.shard_dims:
        group = location.mesh.get_group(dim)
        gathered = parts.new_empty(torch.distributed.get_world_size(group) * len(parts), *parts.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, parts.contiguous(), group=group)
        parts = gathered
    return parts
