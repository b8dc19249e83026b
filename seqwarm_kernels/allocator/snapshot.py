"""What is restored after the passes of `warmup_allocator`, and how.

A module keeps its parameters, buffers and submodules in three dicts among its attributes; an optimizer its state; a
gradient scaler its scale. So all of them are restored in one way: attributes get back the values that they had,
containers among these their entries, tensors their contents, and so do the entries of such containers. Gradients,
`requires_grad` and random states come on top.

Not restored are values deeper inside of containers, other objects that are attributes, sparse tensors, and what hooks
change elsewhere.
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # no public name; DTensor is one of these

from .distributed import is_sharded, reshard
from .memory import HostMemory
from .report import mebibytes

#: Containers whose entries are restored. Classes derived from them may do more than to hold entries.
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


@contextmanager
def restored(
    model: nn.Module, optimizer: Optimizer | None = None, grad_scaler: GradScaler | None = None
) -> Iterator[None]:
    """Restore everything bit for bit at the end of the block, also after an exception.

    Gradients are None inside the block. Tensors stay the same objects in the same memory, their copies are in host
    memory. Parameters of fully_shard must be sharded at its beginning.

    Raises:
        MemoryError: The copies do not fit into the available memory of the host.
    """
    namespaces = list(_namespaces(model, optimizer, grad_scaler))
    hooks = _hooks_of_sharding(model)
    values = list(_unique(value for namespace in namespaces for value in (namespace, *_contents(namespace))))
    values = [value for value in values if id(value) not in hooks]
    tensors = list(_unique(part for value in values for part in _plain_parts(value)))
    _check_host_memory(tensors)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    # The stack calls what it holds in reverse order, each also after an error in another.
    with torch.random.fork_rng(devices), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(numpy.random.set_state, numpy.random.get_state())
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)  # of wrappers, too, which `_namespaces` skips
        for parameter in _parameters(model, optimizer):
            stack.callback(_restore_gradient, parameter, parameter.grad, parameter.requires_grad)
            parameter.grad = None
        for tensor in tensors:
            stack.callback(_TensorCopy(tensor).restore)
        for value in values:
            if (restore := _restorer(value)) is not None:
                stack.callback(restore)
        stack.callback(reshard, model)
        yield


def optimizers_of(optimizer: Optimizer | None) -> list[Optimizer]:
    """Return the optimizer and those that it holds, as ZeroRedundancyOptimizer and Accelerate's wrapper do."""
    if optimizer is None:
        return []
    return [optimizer, *(value for value in _contents(vars(optimizer)) if isinstance(value, Optimizer))]


def _namespaces(
    model: nn.Module, optimizer: Optimizer | None, grad_scaler: GradScaler | None
) -> Iterator[dict[Any, Any]]:
    """Yield the attributes of everything that is restored, and the state and the settings of the optimizer."""
    for module in model.modules():
        if not _is_wrapper(module):
            yield vars(module)
    for each in optimizers_of(optimizer):
        yield from (vars(each), *each.state.values(), *each.param_groups)
    if grad_scaler is not None:
        yield vars(grad_scaler)


def _is_wrapper(module: nn.Module) -> bool:
    """Whether a module is torch's but no layer. DistributedDataParallel counts its calls and buckets in attributes."""
    classes = [
        each.__module__ for each in type(module).__mro__ if issubclass(each, nn.Module) and each is not nn.Module
    ]
    return bool(classes) and all(
        name.startswith("torch.") and not name.startswith("torch.nn.modules.") for name in classes
    )


def _hooks_of_sharding(model: nn.Module) -> set[int]:
    """Return the ids of the dicts of hooks that fully_shard adds in the first forward, and in no other: they stay."""
    if not is_sharded(model):
        return set()
    names = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    return {id(vars(module)[name]) for module in model.modules() for name in names}


def _contents(namespace: dict[Any, Any]) -> Iterator[Any]:
    """Yield the values of a dict, and the entries of the containers among them."""
    for value in namespace.values():
        yield value
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple, set, deque)):
            yield from value


def _unique(values: Iterator[Any]) -> Iterator[Any]:
    return iter({id(value): value for value in values}.values())


def _parameters(model: nn.Module, optimizer: Optimizer | None) -> Iterator[Tensor]:
    """Yield the parameters of the model and the optimizer, each once."""
    groups = [group for each in optimizers_of(optimizer) for group in each.param_groups]
    return _unique(chain(model.parameters(), *(group["params"] for group in groups)))


def _restore_gradient(parameter: Tensor, gradient: Tensor | None, requires_grad: bool) -> None:
    parameter.requires_grad_(requires_grad)
    parameter.grad = gradient


def _restorer(value: Any) -> Callable[[], object] | None:
    """Return a function that gives a value what it holds now. None for values that hold nothing or are not restored."""
    if type(value) in _CONTAINERS:
        return partial(_refill, value, copy.copy(value))
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if type(value) is numpy.ndarray and value.flags.writeable:
        return partial(numpy.copyto, value, value.copy())
    if isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    return None


def _refill(container: Any, entries: Any) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(entries)
    else:
        container.update(entries)


def _plain_parts(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with memory in a value: a tensor itself, this rank's part of a DTensor, none in others."""
    if not isinstance(value, Tensor):
        return
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from _plain_parts(getattr(value, name))
        return
    is_dense = value.layout == torch.strided and not value.is_nested and not value.is_meta
    if is_dense and value.untyped_storage().nbytes() > 0:  # FSDP frees the storage of unsharded parameters
        yield value


class _TensorCopy:
    """The contents of a tensor in host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.before = tensor.data  # stays in this memory if the passes assign to `data`
        self.storage_bytes = self.before.untyped_storage().nbytes()
        self.copied = _contiguous(self.before).to("cpu", copy=True)

    def restore(self) -> None:
        storage = self.before.untyped_storage()
        if storage.nbytes() < self.storage_bytes:
            storage.resize_(self.storage_bytes)  # torch would write behind its end
        _contiguous(self.before).copy_(self.copied)
        if _view(self.tensor) != _view(self.before):
            self.tensor.data = self.before


def _contiguous(tensor: Tensor) -> Tensor:
    """Return a view from the first to the last element in memory: torch does not copy into elements that overlap."""
    if tensor.is_contiguous():
        return tensor
    steps = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided((1 + sum(steps),), (1,))


def _view(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _check_host_memory(tensors: Sequence[Tensor]) -> None:
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun; each makes copies
    needed = processes * sum(tensor.nbytes for tensor in tensors)
    available, total = HostMemory().free()
    if total != 0 and needed > available:
        raise MemoryError(
            f"warmup_allocator needs {mebibytes(needed)} of host memory for copies of {processes} processes, "
            f"{mebibytes(available)} are available"
        )
