"""Where optimizers keep their moments: in PyTorch's layout, and in bitsandbytes' layout with 8-bit codes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

#: Names under which optimizers keep their moments, by kind. A state has at most one name of a kind.
_MOMENT_NAMES = {"momentum": ("exp_avg", "momentum_buffer"), "second_moment": ("exp_avg_sq", "square_avg")}


class OptimizerTensor(NamedTuple):
    """One tensor that statistics are computed from."""

    kind: str  #: "momentum", "second_moment" or "gradients"
    tensor: Tensor
    is_copy: bool  #: whether `tensor` was dequantized, and so is temporary


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


def optimizer_tensors(optimizer: Any, *, with_moments: bool, with_gradients: bool) -> Iterator[OptimizerTensor]:
    """If `with_moments`, those that the state of each parameter has, and, if `with_gradients`, each gradient.

    Raises:
        TypeError, ValueError: as `inner_optimizer`.
    """
    inner = inner_optimizer(optimizer)
    for parameter in parameters_of(inner):
        if with_moments:
            yield from _moments(inner.state.get(parameter) or {})
        if with_gradients and parameter.grad is not None:
            yield OptimizerTensor("gradients", parameter.grad, is_copy=False)


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    for group in inner_optimizer(optimizer).param_groups:
        yield from group["params"]


def inner_optimizer(optimizer: Any) -> Any:
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


def _moments(state: Mapping[str, Any]) -> Iterator[OptimizerTensor]:
    if _has_bitsandbytes_moments(state):
        yield OptimizerTensor("momentum", _dequantized(state, 1), is_copy=True)
        yield OptimizerTensor("second_moment", _dequantized(state, 2), is_copy=True)
        return
    for kind, names in _MOMENT_NAMES.items():
        for name in names:
            if isinstance(state.get(name), Tensor):  # SGD's may be None
                yield OptimizerTensor(kind, state[name], is_copy=False)


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
