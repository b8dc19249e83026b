"""Tensors of a model by where they are, and the part of them that this rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .quantised import is_quantised


class Place(NamedTuple):
    """On a device, and cut over some dimensions of a mesh of ranks, or not."""

    device: torch.device
    mesh: Any = None  #: a torch.distributed.DeviceMesh
    shard_dims: tuple[int, ...] = ()  #: of the mesh: along these, other ranks hold other parts


def waits_for_nothing(devices: Sequence[torch.device]) -> torch.device:
    """Where numbers of all these devices meet: not on the host, which would read before they have arrived."""
    return next((device for device in devices if device.type != "cpu"), devices[0])


class Part(NamedTuple):
    """What this rank has of a tensor."""

    place: Place
    tensor: Tensor  #: dense
    is_copy: bool  #: it was made for this alone


def part_of(tensor: Tensor, *, is_copy: bool = False) -> Part:
    """The dense tensor that a tensor stands for, on this rank; `is_copy` where it was made for this alone.

    Raises:
        ValueError: its ranks hold summands, not parts.
    """
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        if tensor.layout == torch.strided:
            return Part(Place(tensor.device), tensor, is_copy)
        return Part(Place(tensor.device), tensor.coalesce().values(), True)
    mesh: Any = None
    shard_dims: tuple[int, ...] = ()
    if hasattr(tensor, "device_mesh"):
        mesh, shard_dims = tensor.device_mesh, _shard_dims(tensor)
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    is_copy = is_quantised(tensor)
    if is_copy:
        tensor = tensor.dequantize()
    return Part(Place(tensor.device, mesh, shard_dims), tensor, is_copy)


def _shard_dims(tensor: Any) -> tuple[int, ...]:
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"a DTensor must be sharded or replicated, got {tensor.placements}: sum it over its ranks first"
        )
    return tuple(dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())


def over_ranks(statistics: Tensor, place: Place) -> Tensor:
    """(N,) of this rank to (R, N) of all ranks that hold parts of a place, in the same order on each of them."""
    parts = statistics[None]
    for dim in place.shard_dims:
        group = place.mesh.get_group(dim)
        gathered = parts.new_empty(torch.distributed.get_world_size(group) * len(parts), *parts.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, parts.contiguous(), group=group)
        parts = gathered
    return parts
