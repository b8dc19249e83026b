"""Checks of the arguments of `warmup_allocator`, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..resizing.containers import flatten_batch
from ..resizing.entry_names import own_name
from ..resizing.functional import resize_batch
from ..resizing.packing import BOUNDARIES, PACKED_NAMES, packed_bounds
from ..resizing.sharded import holds_dtensors
from ..schedule.attachment import check_resize_options
from ..schedule.scheduler import SequenceLengthScheduler
from ..utils.caller_warnings import warn_caller
from ..utils.checks import check_bool, check_int, check_real
from ..utils.modules import ExampleBatch, as_mapping

#: Parameters of `resize_batch` that a warmup does not take: it passes the batch, and gets nothing but the batch back.
_NOT_RESIZE_OPTIONS = {"batch", "seq_len", "return_info"}


def check_types(
    example_batch: ExampleBatch | None,
    loss_fn: object,
    shard_batch: object,
    optimizer: Optimizer | None,
    autocast_dtype: torch.dtype | None,
    grad_scaler: object,
    scheduler: object,
    flags: Mapping[str, object],
) -> None:
    if example_batch is not None:
        as_mapping(example_batch)
    for name, function in (("loss_fn", loss_fn), ("shard_batch", shard_batch)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable or None, got {type(function).__name__}")
    for name, value, kind, words in (
        ("optimizer", optimizer, Optimizer, "a torch optimizer"),
        ("autocast_dtype", autocast_dtype, torch.dtype, "a torch.dtype"),
        ("grad_scaler", grad_scaler, GradScaler, "a torch.amp.GradScaler"),
        ("scheduler", scheduler, SequenceLengthScheduler, "a SequenceLengthScheduler"),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be {words} or None, got {type(value).__name__}")
    _check_step(optimizer)
    if autocast_dtype is not None and not autocast_dtype.is_floating_point:
        raise ValueError(f"autocast_dtype must be a floating-point dtype, got {autocast_dtype}")
    for name, flag in flags.items():
        check_bool(name, flag)


def _check_step(optimizer: Optimizer | None) -> None:
    """The passes call `optimizer.step()`. Optimizers such as LBFGS need a closure that computes the loss."""
    closure = None if optimizer is None else inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"optimizer must have a step without a closure, got {type(optimizer).__name__}, which needs one: leave "
            "optimizer out, then the memory of its state is not allocated"
        )


def warn_of_foreign_optimizer(model: nn.Module, optimizer: Optimizer | None) -> None:
    """A warning only: the optimizer may hold copies of the model's parameters."""
    if optimizer is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(map(id, model.parameters())):
        warn_caller("optimizer holds no parameter of model: the memory of its state may not be allocated")


def check_batch_size(batch_size: Any) -> int | Literal["auto"] | None:
    if batch_size is None or (isinstance(batch_size, str) and batch_size == "auto"):
        return batch_size  # type: ignore[return-value]
    if isinstance(batch_size, str):
        raise ValueError(f"batch_size must be an int or 'auto', got {batch_size!r}")
    return check_int("batch_size", batch_size, minimum=1)


def check_max_grad_norm(max_grad_norm: object) -> float | None:
    if max_grad_norm is None:
        return None
    norm = check_real("max_grad_norm", max_grad_norm)
    if norm <= 0:
        raise ValueError(f"max_grad_norm must be positive, got {norm}")
    return norm


def check_options(resize_options: object) -> None:
    if resize_options is None:
        return
    if not isinstance(resize_options, Mapping):
        raise TypeError(f"resize_options must be a mapping or None, got {type(resize_options).__name__}")
    known = set(inspect.signature(resize_batch).parameters) - _NOT_RESIZE_OPTIONS
    unknown = [name for name in resize_options if name not in known]
    if unknown:
        raise ValueError(f"resize_options must hold options of resize_batch, {sorted(known)}, got {unknown}")
    check_resize_options(resize_options)


def check_packed_example(
    example_batch: ExampleBatch | None, max_len: int, batch_size: int | str | None, seq_dim: int
) -> None:
    """A packed batch is one row. Its boundaries cannot be repeated, position ids that restart at 0 can."""
    entries = {} if example_batch is None else flatten_batch(as_mapping(example_batch))
    names = [own_name(name) for name, value in entries.items() if value is not None]
    if PACKED_NAMES.isdisjoint(names) or holds_dtensors(entries, None):
        return
    bounds = packed_bounds(entries, seq_dim)
    if bounds is None:
        return
    if max_len != bounds[-1] and not BOUNDARIES.isdisjoint(names):
        raise ValueError(f"max_len must be {bounds[-1]}, the number of tokens of a packed example_batch, got {max_len}")
    if batch_size not in (None, 1):
        raise ValueError(f"batch_size must be 1, the one row of a packed example_batch, got {batch_size!r}")
