"""Refuses calls inside torch's context parallelism, which would give wrong results without an error.

torch's `context_parallel`, and its `_enable_context_parallel_dispatcher` for modules with the style `_ContextParallel`,
both replace the dispatcher's handlers while they are active. torch has no public way to ask. The names here are as
experimental, and are in no other file.
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


def refuse_context_parallel(is_compiling: bool) -> None:
    """Raise ValueError if torch's context parallelism is active.

    DTensors with sharded tokens are refused elsewhere. Plain tensors of a part of the tokens cannot be told from whole
    rows while it is not active.
    """
    module = _module_of_torch(is_compiling)
    if module is not None and _is_active(module):
        raise ValueError(
            "alibi_attention does not support torch's context_parallel; use seqwarm_kernels.parallel.context_attention"
        )


def refuse_unordered_shards() -> None:
    """Raise ValueError if torch gives each rank some of the first and some of the last tokens, as its default is."""
    module = _module_of_torch(torch.compiler.is_compiling())
    if module is not None and _is_active(module) and module._cp_options.enable_load_balance:
        raise ValueError(
            "context_attention does not support the load balancing of torch's context_parallel; "
            "use seqwarm_kernels.parallel.shard_sequence"
        )


def refuse_context_parallel_style(module: nn.Module) -> None:
    """Raise ValueError if an ALiBi layer has the hooks of torch's `_ContextParallel`."""
    if not module._forward_pre_hooks:
        return
    for hook in module._forward_pre_hooks.values():
        if type(getattr(getattr(hook, "func", None), "__self__", None)).__name__ == _STYLE:
            layer = type(module).__name__
            raise ValueError(f"{layer} does not support torch's {_STYLE}; use seqwarm_kernels.parallel.ContextParallel")


def _module_of_torch(is_compiling: bool) -> ModuleType | None:
    """torch's module, or None where nothing can have switched context parallelism on."""
    if not is_compiling:
        return sys.modules.get(_MODULE)
    if not torch.distributed.is_available():
        return None
    # torch.compile cannot trace sys.modules while another thread imports. It guards what is read of the module: once
    # context parallelism is switched on, it traces again.
    from torch.distributed.tensor.experimental._context_parallel import _attention  # Dynamo has loaded it

    return _attention


def _is_active(module: ModuleType) -> bool:
    return module.DTensor._op_dispatcher._custom_op_handlers is not module.existing_custom_ops
