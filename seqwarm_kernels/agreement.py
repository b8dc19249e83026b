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
        outcome = torch.tensor(int(own), device=self.device)
        torch.distributed.all_reduce(outcome, torch.distributed.ReduceOp.MAX, group=self.group)
        return Outcome(int(outcome.item()))


def _process_group(model: nn.Module) -> Any:
    """Of the ranks that hold the same model, or None."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.process_group
    return torch.distributed.group.WORLD if _sharded_modules(model) else None


def _sharded_modules(model: nn.Module) -> list[Any]:
    """Those that fully_shard was applied to."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def without_traces(model: nn.Module) -> Iterator[None]:
    """DistributedDataParallel keeps gradients to itself, its buckets and flags; fully_shard's parameters are sharded
    again afterwards, also after an exception."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    wrapper = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
    flags = {} if wrapper is None else {name: value for name, value in vars(wrapper).items() if _is_flag(value)}
    try:
        if wrapper is not None:
            wrapper.require_forward_param_sync = False  # ranks that wait for buffers of one that failed wait forever
        with nullcontext() if wrapper is None else wrapper.no_sync():
            yield
    finally:
        if wrapper is not None:
            vars(wrapper).update(flags)
        for module in _sharded_modules(model) if distributed else ():
            module.reshard()


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, (bool, int))
