"""Where optimizers keep their moments: in PyTorch's layout, and in bitsandbytes' layout with 8-bit codes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class OptimizerTensor(NamedTuple):
    """One tensor that statistics are computed from."""

    kind: str  #: "momentum", "second_moment" or "gradients"
    tensor: Tensor
    is_copy: bool  #: whether `tensor` was dequantized, and so is temporary


def check_optimizer(optimizer: Any) -> None:
    """Check that an optimizer, or the one that it wraps, keeps a second moment or will do so from its first step on.

    Some optimizers of other packages look like Adam before their first step; they pass this check until then.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        ValueError: `optimizer` does not keep a second moment.
    """
    inner = _unwrapped(optimizer)
    states = [state for parameter in parameters_of(inner) if (state := inner.state.get(parameter))]
    for state in states:
        _check_has_moments(state, inner)
    if not states and not all("betas" in group for group in inner.param_groups):
        raise _no_second_moment(inner, "no state, and groups without betas")
    if isinstance(inner, torch.optim.Adamax):
        raise _no_second_moment(inner, "which keeps the largest gradients in place of a second moment")


def rank_sharding_of(optimizer: Any) -> str | None:
    """What shards the parameters so that an optimizer sees plain tensors, its rank's parts; None if nothing does."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for parameter in parameters_of(optimizer):
        # A parameter that was flattened, and that use_orig_params=True keeps, has only a private mark.
        if fsdp is not None and (isinstance(parameter, fsdp.FlatParameter) or hasattr(parameter, "_fsdp_flattened")):
            return "FullyShardedDataParallel"
        if hasattr(parameter, "ds_id"):
            return "DeepSpeed ZeRO"
    while _is_optimizer(optimizer):
        if type(optimizer).__module__.partition(".")[0] == "deepspeed" and "Zero" in type(optimizer).__name__:
            return "DeepSpeed ZeRO"
        optimizer = getattr(optimizer, "optimizer", None)
    return None


def optimizer_tensors(optimizer: Any, *, with_gradients: bool) -> Iterator[OptimizerTensor]:
    """Both moments of each parameter that has a state, and, if `with_gradients`, each gradient.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        ValueError: `optimizer` does not keep a second moment, or not for all parameters.
    """
    inner = _unwrapped(optimizer)
    has_moments = False
    for parameter in parameters_of(inner):
        if state := inner.state.get(parameter):
            has_moments = True
            yield from _moments(state, inner)
        if with_gradients and parameter.grad is not None:
            yield OptimizerTensor("gradients", parameter.grad, is_copy=False)
    if not has_moments:
        check_optimizer(inner)


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    for group in _unwrapped(optimizer).param_groups:
        yield from group["params"]


def _unwrapped(optimizer: Any) -> Any:
    """The innermost optimizer, for wrappers such as Accelerate's.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        ValueError: the inner optimizer holds only this rank's part, as in torch's ZeroRedundancyOptimizer.
    """
    while _is_optimizer(getattr(optimizer, "optimizer", None)):
        optimizer = optimizer.optimizer
    if not _is_optimizer(optimizer):
        raise TypeError(f"optimizer must have param_groups and state, got {type(optimizer).__name__}")
    if _is_optimizer(getattr(optimizer, "optim", None)):
        raise ValueError(
            f"optimizer must hold the state of all its parameters, got {type(optimizer).__name__}, which holds this "
            "rank's part in .optim; pass .optim for the statistics of that part"
        )
    return optimizer


def _is_optimizer(value: object) -> bool:
    return hasattr(value, "param_groups") and hasattr(value, "state")


def _moments(state: Mapping[str, Any], optimizer: Any) -> Iterator[OptimizerTensor]:
    _check_has_moments(state, optimizer)
    if "exp_avg_sq" in state and "exp_avg" in state:
        yield OptimizerTensor("momentum", state["exp_avg"], is_copy=False)
        yield OptimizerTensor("second_moment", state["exp_avg_sq"], is_copy=False)
    else:
        yield OptimizerTensor("momentum", _dequantized(state, 1), is_copy=True)
        yield OptimizerTensor("second_moment", _dequantized(state, 2), is_copy=True)


def _check_has_moments(state: Mapping[str, Any], optimizer: Any) -> None:
    if not ("exp_avg" in state and "exp_avg_sq" in state) and not _has_bitsandbytes_moments(state):
        raise _no_second_moment(optimizer, f"a parameter's state holds {', '.join(map(str, state))}")


def _no_second_moment(optimizer: Any, found: str) -> ValueError:
    return ValueError(
        f"optimizer must keep exp_avg and exp_avg_sq for each parameter, as Adam does, got {type(optimizer).__name__} "
        f"({found})"
    )


def _has_bitsandbytes_moments(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state has both moments in bitsandbytes' layout, where small parameters keep 32 bits."""
    return all(
        isinstance(state.get(f"state{which}"), Tensor)
        and (state[f"state{which}"].is_floating_point() or f"absmax{which}" in state)
        for which in (1, 2)
    )


def _dequantized(state: Mapping[str, Any], which: int) -> Tensor:
    """The first or second moment of a bitsandbytes optimizer.

    An element is qmap[code] times the largest value of its block. All blocks have the same number of elements, a power
    of two; only the last block may be shorter. The number of blocks determines that power: no two powers cut a tensor
    into the same number of blocks above one.
    """
    codes = state[f"state{which}"]
    if codes.is_floating_point():
        return codes
    qmap, largest = state[f"qmap{which}"], state[f"absmax{which}"]
    block = 1
    while block * largest.numel() < codes.numel():
        block *= 2
    scale = largest.repeat_interleave(block)[: codes.numel()]
    return qmap[codes.flatten().int()] * scale
