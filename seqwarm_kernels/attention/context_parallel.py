"""Refuses calls inside torch's context parallelism, which would give wrong results without an error.

torch's `context_parallel`, and its `_enable_context_parallel_dispatcher` for modules with the style `_ContextParallel`,
both replace the dispatcher's handlers while they are active. The other names here are as experimental, and are in no
other file.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from torch import nn

#: Where torch keeps its context parallelism. Loaded only by those who use DTensors.
_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
#: A style whose hooks change the inputs of a module: DTensors of shards, or the keys and values of all ranks.
_STYLE = "_ContextParallel"

_ADVICE = (
    "positions and keys would be those of the part. Call seqwarm_kernels.parallel.context_attention, or apply "
    "seqwarm_kernels.parallel.ContextParallel to the model,"
)


def refuse_context_parallel() -> None:
    """Raise ValueError if torch's context parallelism is active. For calls that are not compiled.

    DTensors with sharded tokens are refused elsewhere. Plain tensors of a part of the tokens cannot be told from whole
    rows while it is not active.
    """
    module = sys.modules.get(_MODULE)
    if module is not None and _is_active(module):
        raise ValueError(_message())


def refuse_context_parallel_in_graph() -> None:
    """`refuse_context_parallel` for calls that are compiled."""
    module = _module_in_graph()
    if module is not None and _is_active(module):
        raise ValueError(_message())


def refuse_unordered_shards() -> None:
    """Raise ValueError if torch gives each rank some of the first and some of the last tokens, as its default is."""
    module = _module_in_graph() if torch.compiler.is_compiling() else sys.modules.get(_MODULE)
    if module is not None and _is_active(module) and module._cp_options.enable_load_balance:
        raise ValueError(
            "query must hold a contiguous part of the tokens, got a call inside torch's context parallelism, which "
            "gives each rank some of the first and some of the last tokens: shard batches by "
            "seqwarm_kernels.parallel.shard_sequence, outside of context_parallel"
        )


def refuse_context_parallel_style(module: nn.Module) -> None:
    """Raise ValueError if an ALiBi layer has the hooks of torch's `_ContextParallel`."""
    if not module._forward_pre_hooks:
        return
    for hook in module._forward_pre_hooks.values():
        if type(getattr(getattr(hook, "func", None), "__self__", None)).__name__ == _STYLE:
            raise ValueError(
                f"{type(module).__name__} must have no {_STYLE} of torch, which gathers keys for flex_attention or "
                f"shards them for scaled_dot_product_attention: {_ADVICE} instead"
            )


def _module_in_graph() -> ModuleType | None:
    """torch's module while a function is compiled.

    torch.compile guards what is read of it: if context parallelism is switched on later, it does not run the graph, but
    traces the function once more.
    """
    if not torch.distributed.is_available():
        return None
    from torch.distributed.tensor.experimental._context_parallel import _attention  # Dynamo has loaded it

    return _attention


def _is_active(module: ModuleType) -> bool:
    return module.DTensor._op_dispatcher._custom_op_handlers is not module.existing_custom_ops


def _message() -> str:
    return (
        "query must hold the tokens of whole rows, got a call inside torch's context_parallel, or after its "
        "_enable_context_parallel_dispatcher, which leave each rank a part of the tokens and exchange keys for "
        f"scaled_dot_product_attention alone: {_ADVICE} outside of context_parallel"
    )
