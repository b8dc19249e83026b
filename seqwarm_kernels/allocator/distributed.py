"""Models that several processes train together: how they pass without traces, and how the ranks agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from typing import Any

import torch
from torch import nn


class Outcome(IntEnum):
    """Of one rank's attempt; the largest of all ranks counts."""

    FITS = 0
    OUT_OF_MEMORY = 1
    FAILED = 2


class Agreement:
    """What the ranks of one model make of each other's outcomes. A model of one process agrees with itself."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.group = _process_group(model)
        on_device = self.group is not None and torch.distributed.get_backend(self.group) == "nccl"
        self.device = device if on_device else torch.device("cpu")

    def worst(self, own: Outcome) -> Outcome:
        """Every rank must call this as often as the others."""
        if self.group is None:
            return own
        return Outcome(self.largest(int(own)))

    def largest(self, own: int) -> int:
        """Of all ranks' numbers."""
        if self.group is None:
            return own
        number = torch.tensor(own, device=self.device)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(number.item())


def _process_group(model: nn.Module) -> Any:
    """Of the ranks that hold the same model, or None."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    wrapper = _wrapper_of(model)
    if wrapper is not None:
        return wrapper.process_group
    return torch.distributed.group.WORLD if _sharded_modules(model) else None


def _wrapper_of(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """It may lie in a compiled module."""
    return next((m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)), None)


def _sharded_modules(model: nn.Module) -> list[Any]:
    """Those that fully_shard was applied to."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Give up the whole parameters that fully_shard has put together."""
    for module in _sharded_modules(model):
        module.reshard()


@contextmanager
def without_traces(model: nn.Module) -> Iterator[None]:
    """DistributedDataParallel keeps gradients to itself, its buckets and flags; fully_shard's parameters are sharded
    again afterwards, also after an exception."""
    wrapper = _wrapper_of(model)
    flags = {} if wrapper is None else {name: value for name, value in vars(wrapper).items() if _is_flag(value)}
    try:
        if wrapper is not None:
            wrapper.require_forward_param_sync = False  # ranks that wait for buffers of one that failed wait forever
        with nullcontext() if wrapper is None else wrapper.no_sync():
            yield
    except BaseException:
        end_iteration(model)
        raise
    finally:
        if wrapper is not None:
            vars(wrapper).update(flags)
        reshard(model)


def end_iteration(model: nn.Module) -> None:
    """What fully_shard does when a backward has ended, for one that has not: else it takes the next backward for a part
    of this one, and never reduces a gradient again. It has no public door for that."""
    states = [module._get_fsdp_state() for module in _sharded_modules(model)]
    for state in states:
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch before 2.13 has one
        for parameter in [parameter for group in groups if group for parameter in group.fsdp_params]:
            parameter.unsharded_accumulated_grad = None  # nothing is left to exchange with other ranks
            if getattr(parameter, "_unsharded_param", None) is not None:
                parameter._unsharded_param.grad = None
    for state in states:
        if state._is_root:
            state._state_ctx.iter_forward_root = None
            state._root_post_backward_final_callback()


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, (bool, int))
