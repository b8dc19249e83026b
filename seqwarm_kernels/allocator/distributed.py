"""Distributed models: training passes without side effects, and one decision on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from ..utils.ranks import has_process_group


class Outcome(IntEnum):
    """Outcome of an attempt on one rank. The largest value of all ranks counts."""

    FITS = 0
    OUT_OF_MEMORY = 1
    FAILED = 2


class RankConsensus:
    """Exchanges values between the ranks of a process group. Does nothing without a group."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        on_device = group is not None and torch.distributed.get_backend(group) == "nccl"
        self.device = device if on_device else torch.device("cpu")

    def worst_outcome(self, own: Outcome) -> Outcome:
        """Return the worst outcome of all ranks. Every rank must make the same number of calls."""
        return Outcome(self.largest(int(own)))

    def smallest(self, own: int) -> int:
        """Return the smallest number of all ranks. Every rank must make the same number of calls."""
        return -self.largest(-own)

    def largest(self, own: int) -> int:
        """Return the largest number of all ranks. Every rank must make the same number of calls."""
        if self.group is None:
            return own
        number = torch.tensor(own, device=self.device)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(number.item())


@contextmanager
def rank_consensus(model: nn.Module, device: torch.device, *, are_waiting: bool) -> Iterator[RankConsensus]:
    """Yield the consensus of the ranks that hold the same model.

    They agree in a gloo group of their own: a rank that leaves a pass of fully_shard early leaves the others in a
    collective of the model's group, and NCCL allocates memory of a device that may have none left. Only ranks that are
    some of all ranks agree in the group of DistributedDataParallel, since making a group takes all ranks.

    Args:
        model: May be wrapped in DistributedDataParallel.
        device: Of the model.
        are_waiting: Whether ranks wait for each other inside a pass, as under fully_shard.
    """
    wrapper = _find_wrapper(model) if has_process_group() else None
    group = None if wrapper is None else wrapper.process_group
    if are_waiting or (group is not None and group.size() == torch.distributed.get_world_size()):
        own = torch.distributed.new_group(backend="gloo")
        try:
            yield RankConsensus(own, device)
        finally:
            torch.distributed.destroy_process_group(own)
    else:
        yield RankConsensus(group, device)


def _find_wrapper(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the DistributedDataParallel module, which may be inside a compiled module."""
    return next((m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)), None)


def check_wrapper(model: nn.Module) -> None:
    """Raise ValueError for wrappers that do not run without an exchange of gradients."""
    if _is_deepspeeds(model):
        raise ValueError(
            f"model must not be DeepSpeed's yet, got {type(model).__name__}: call warmup_allocator on the model before "
            "deepspeed.initialize"
        )
    wrapper = _find_wrapper(model)
    if wrapper is not None and wrapper.static_graph:
        raise ValueError(
            "model must not be a DistributedDataParallel with static_graph=True: call warmup_allocator before wrapping"
        )


def _is_deepspeeds(model: nn.Module) -> bool:
    """Whether the model is DeepSpeed's engine, or ZeRO has marked its parameters: its hooks keep their gradients."""
    is_engine = any(base.__name__ == "DeepSpeedEngine" for base in type(model).__mro__)
    return is_engine or any(hasattr(p, "ds_id") or hasattr(p, "param_idx_in_group") for p in model.parameters())


def _sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that fully_shard was applied to."""
    if not has_process_group():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def is_sharded(model: nn.Module) -> bool:
    return bool(_sharded_modules(model))


def reshard(model: nn.Module) -> None:
    """Free the unsharded parameters of fully_shard."""
    for module in _sharded_modules(model):
        module.reshard()


@contextmanager
def without_gradient_exchange(model: nn.Module) -> Iterator[None]:
    """Run a block without gradient or buffer exchange in DistributedDataParallel, and restore its flags.

    After an exception, the interrupted iteration of fully_shard is ended.
    """
    wrapper = _find_wrapper(model)
    flags = {} if wrapper is None else {name: value for name, value in vars(wrapper).items() if _is_flag(value)}
    try:
        if wrapper is not None:
            wrapper.require_forward_param_sync = False  # else ranks wait forever for buffers of a rank that failed
        with nullcontext() if wrapper is None else wrapper.no_sync():
            yield
    except BaseException:
        end_iteration(model)
        raise
    finally:
        if wrapper is not None:
            vars(wrapper).update(flags)


def end_iteration(model: nn.Module) -> None:
    """Do for an interrupted backward what fully_shard does at the end of a complete one.

    Otherwise fully_shard treats the next backward as part of the interrupted one, and never reduces a gradient again.
    """
    modules = _sharded_modules(model)
    if torch.__version__ >= "2.15":  # compared as versions; in 2.13 reset_iter_state leaves gradients behind
        for module in modules:
            if module._get_fsdp_state()._is_root:
                module.reset_iter_state()
        return
    states = [module._get_fsdp_state() for module in modules]
    for state in states:
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch before 2.13 has one
        for parameter in [parameter for group in groups if group for parameter in group.fsdp_params]:
            parameter.unsharded_accumulated_grad = None  # no gradient is left to exchange with other ranks
            if getattr(parameter, "_unsharded_param", None) is not None:
                parameter._unsharded_param.grad = None
    for state in states:
        if state._is_root:
            state._state_ctx.iter_forward_root = None
            state._root_post_backward_final_callback()


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, (bool, int))
