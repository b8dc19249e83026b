"""Statistics of an optimizer's moments and gradients, computed on the device that holds them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..ops import backends
from ..ops.library import overload
from ..ops.moment_statistics.schema import Statistic, accumulation_dtype
from .device_to_host import gather_device
from .optimizer_state import OptimizerTensor, optimizer_tensors, parameters_of
from .sharding import ShardLocation, gather_over_ranks, local_part

_OPERATOR = "moment_statistics"
_MAXIMA = [Statistic.VARIANCE_MAX, Statistic.MOMENTUM_MAX]
#: What each of the operator's numbers is taken from, in their order.
_KINDS = ("second_moment", "second_moment", "momentum", "momentum", "gradients")
#: Number of elements of quantized moments that are in memory as floating-point numbers at one time.
_MAX_COPIED_ELEMENTS = 2**25


class MomentStatistics(NamedTuple):
    """0-d tensors, float64 (float32 on MPS), over all elements of all parameters that have a moment or a gradient.

    Statistics of what no parameter has are None: of a moment that the optimizer does not keep, of all moments before
    the first step, and the norm without gradients. √v is the square root of the second moment as stored, without Adam's
    bias correction.
    """

    variance_l1: Tensor | None  #: Σ √v
    variance_max: Tensor | None  #: the largest √v
    momentum_l1: Tensor | None  #: Σ |m|
    momentum_max: Tensor | None  #: the largest |m|
    grad_norm: Tensor | None  #: l2 norm of the gradients in `.grad`


@dataclass
class _Batch:
    """The arguments of one call of the operator."""

    momentum: list[Tensor] = field(default_factory=list)
    second_moment: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    copied_elements: int = 0


@torch.no_grad()
def moment_statistics(optimizer: Any, *, backend: str | None = None) -> MomentStatistics:
    """Sum and maximum of √v and |m|, and the norm of the gradients, without waiting for a device.

    Calls `seqwarm::moment_statistics` once for each device. Sharded states (DTensor) are summed over their ranks, so
    all ranks must call this function. 8-bit moments are converted to floating-point numbers, one share at a time, with
    one call for each share.

    Args:
        optimizer: any optimizer. Its momentum is the state's exp_avg (Adam, Lion) or momentum_buffer (SGD, Muon), its
            second moment exp_avg_sq (Adam) or square_avg (RMSprop). Also torchao's and bitsandbytes' 8-bit Adam, and a
            wrapper that has an optimizer as `.optimizer`.
        backend: "triton", "native" or "reference"; None for the best available backend.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        ValueError: `optimizer` holds only this rank's part of the states, or `backend` does not support its tensors.
    """
    numbers, kinds = raw_statistics(optimizer, backend=backend)
    found = MomentStatistics(*existing(numbers.unbind(), kinds))
    return found if found.grad_norm is None else found._replace(grad_norm=found.grad_norm.sqrt())


def gradient_norm(optimizer: Any) -> Tensor | None:
    """The l2 norm of the gradients in `.grad`, as in `moment_statistics`. None without gradients."""
    numbers, kinds = raw_statistics(optimizer, with_moments=False)
    return numbers[Statistic.GRADIENT_SQUARES].sqrt() if kinds else None


T = TypeVar("T")


def existing(numbers: Iterable[T], kinds: Collection[str]) -> list[T | None]:
    """The operator's five numbers, with None for those of kinds that no parameter has."""
    return [number if kind in kinds else None for number, kind in zip(numbers, _KINDS, strict=True)]


@torch.no_grad()
def raw_statistics(
    optimizer: Any, *, with_moments: bool = True, with_gradients: bool = True, backend: str | None = None
) -> tuple[Tensor, set[str]]:
    """The operator's five numbers (5,) over all devices and ranks, and the kinds of tensors that parameters have."""
    found: dict[ShardLocation, list[Tensor]] = {}
    kinds: set[str] = set()
    tensors = optimizer_tensors(optimizer, with_moments=with_moments, with_gradients=with_gradients)
    for location, batch in _batches(tensors):
        kinds.update(kind for kind in _KINDS if getattr(batch, kind))
        operator = overload(_OPERATOR, backends.choose(_OPERATOR, location.device.type, backend))
        found.setdefault(location, []).append(operator(batch.momentum, batch.second_moment, batch.gradients))
    parts = [gather_over_ranks(_combined(torch.stack(rows)), location) for location, rows in found.items()]
    if not parts:
        device = next((parameter.device for parameter in parameters_of(optimizer)), torch.device("cpu"))
        backends.choose(_OPERATOR, device.type, backend)  # raises also where there is nothing to compute yet
        return torch.zeros(len(Statistic), dtype=accumulation_dtype(device), device=device), kinds
    device = gather_device([part.device for part in parts])
    return _combined(torch.cat([part.to(device, non_blocking=True) for part in parts])), kinds


def _batches(tensors: Iterable[OptimizerTensor]) -> Iterator[tuple[ShardLocation, _Batch]]:
    """All tensors, grouped by location. A location with many temporary copies yields several batches."""
    batches: dict[ShardLocation, _Batch] = {}
    for kind, tensor, is_copy in tensors:
        part = local_part(tensor, is_copy=is_copy)
        batch = batches.setdefault(part.location, _Batch())
        getattr(batch, kind).append(part.tensor)
        if part.is_copy:
            batch.copied_elements += part.tensor.numel()
            if batch.copied_elements >= _MAX_COPIED_ELEMENTS:
                yield part.location, batches.pop(part.location)
    yield from batches.items()


def _combined(rows: Tensor) -> Tensor:
    """Statistics of several parts (N, 5) to the statistics of the whole (5,)."""
    if len(rows) == 1:
        return rows[0]
    sums, maxima = rows.sum(dim=0), rows.amax(dim=0)
    # A list of indices would be copied to the device, which waits for it.
    return torch.stack([(maxima if statistic in _MAXIMA else sums)[statistic] for statistic in Statistic])
