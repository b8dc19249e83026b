"""The sizes of an optimizer's moments, on the device that they are on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import backends
from ..ops.library import overload
from ..ops.moment_statistics.schema import Statistic, accumulation_dtype
from .optimizer_state import check_optimizer, pair_of, parameters_of, unwrapped_optimizer
from .sharding import Part, Place, over_ranks, part_of, waits_for_nothing

_OPERATOR = "moment_statistics"
_LARGEST = [Statistic.VARIANCE_MAX, Statistic.MOMENTUM_MAX]
#: Elements of quantised moments that are in memory as floating-point numbers at a time.
_COPIED_AT_ONCE = 2**25


class MomentStatistics(NamedTuple):
    """0-d tensors, float64 (float32 on MPS), over all elements of all parameters that were stepped.

    √v is the root of the second moment as stored, without Adam's bias correction.
    """

    variance_l1: Tensor  #: Σ √v
    variance_max: Tensor  #: the largest √v
    momentum_l1: Tensor  #: Σ |m|
    momentum_max: Tensor  #: the largest |m|
    grad_norm: Tensor | None  #: l2 norm of the gradients as they lie in .grad; None where there is none


@dataclass
class _Batch:
    """Arguments of one call of the operator."""

    momentum: list[Tensor] = field(default_factory=list)
    second_moment: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    copied: int = 0  #: elements


@torch.no_grad()
def moment_statistics(optimizer: Any, *, backend: str | None = None) -> MomentStatistics:
    """Sum and maximum of √v and |m|, and the norm of the gradients, without waiting for a device.

    For each device and backend one call of `seqwarm::moment_statistics`. Sharded states (DTensor) are summed over their
    ranks, all of which must call; moments of 8 bits are made floating-point numbers, a share of them at a time.

    Args:
        optimizer: Adam, AdamW, NAdam, RAdam, ... (fused, foreach, capturable); any whose state has exp_avg and
            exp_avg_sq; torchao's and bitsandbytes' 8-bit ones; one that has such an optimizer as `.optimizer`. Before
            its first step all statistics of moments are 0, as Adam's moments are.
        backend: "triton", "native" or "reference"; None for the best there is.

    Raises:
        TypeError: `optimizer` is none.
        ValueError: `optimizer` keeps no second moment, or not for all parameters; `backend` cannot serve its tensors.
    """
    numbers, has_gradients = raw_statistics(optimizer, with_gradients=True, backend=backend)
    variance_l1, variance_max, momentum_l1, momentum_max, squares = numbers.unbind()
    norm = squares.sqrt() if has_gradients else None
    return MomentStatistics(variance_l1, variance_max, momentum_l1, momentum_max, norm)


@torch.no_grad()
def raw_statistics(optimizer: Any, *, with_gradients: bool, backend: str | None = None) -> tuple[Tensor, bool]:
    """The operator's five numbers (5,) over all devices and ranks, and whether any parameter has a gradient."""
    inner = unwrapped_optimizer(optimizer)
    found: dict[Place, list[Tensor]] = {}
    has_moments = has_gradients = False
    for place, batch in _batches(inner, with_gradients):
        has_moments |= bool(batch.momentum)
        has_gradients |= bool(batch.gradients)
        operator = overload(_OPERATOR, backends.choose(_OPERATOR, place.device.type, backend))
        found.setdefault(place, []).append(operator(batch.momentum, batch.second_moment, batch.gradients))
    if not has_moments:
        check_optimizer(inner)
    parts = [over_ranks(_together(torch.stack(numbers)), place) for place, numbers in found.items()]
    if not parts:
        device = next((parameter.device for parameter in parameters_of(inner)), torch.device("cpu"))
        return torch.zeros(len(Statistic), dtype=accumulation_dtype(device), device=device), False
    device = waits_for_nothing([part.device for part in parts])
    return _together(torch.cat([part.to(device, non_blocking=True) for part in parts])), has_gradients


def _batches(optimizer: Any, with_gradients: bool) -> Iterator[tuple[Place, _Batch]]:
    """All tensors by their places. A place comes several times where its tensors are copies."""
    batches: dict[Place, _Batch] = {}
    for kind, part in _parts(optimizer, with_gradients):
        if (batch := batches.get(part.place)) is None:
            batch = batches[part.place] = _Batch()
        getattr(batch, kind).append(part.tensor)
        if part.is_copy:
            batch.copied += part.tensor.numel()
            if batch.copied >= _COPIED_AT_ONCE:
                yield part.place, batches.pop(part.place)
    yield from batches.items()


def _parts(optimizer: Any, with_gradients: bool) -> Iterator[tuple[str, Part]]:
    for parameter in parameters_of(optimizer):
        if state := optimizer.state.get(parameter):
            pair = pair_of(state, optimizer)
            yield "momentum", part_of(pair.momentum, is_copy=pair.are_copies)
            yield "second_moment", part_of(pair.second_moment, is_copy=pair.are_copies)
        if with_gradients and parameter.grad is not None:
            yield "gradients", part_of(parameter.grad)


def _together(rows: Tensor) -> Tensor:
    """(N, 5) of parts to the (5,) of the whole."""
    if len(rows) == 1:
        return rows[0]
    whole = rows.sum(dim=0)
    whole[_LARGEST] = rows[:, _LARGEST].amax(dim=0)
    return whole
