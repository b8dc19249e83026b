"""Leave no trace: what training changes in a model, an optimizer and the random streams, kept and put back."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves


@contextmanager
def preserved(
    model: nn.Module, optimizer: Optimizer | None = None, grad_scaler: GradScaler | None = None
) -> Iterator[None]:
    """Inside, train as you like; afterwards, also after an exception, all is bit for bit as before.

    Kept: parameters, buffers, gradients (which start as None inside), train/eval flags, the optimizer's state
    and settings, the scaler's, and the random streams of torch (CPU and every CUDA device), Python and NumPy.
    Copies lie in host memory. Tensors stay the same objects. Hooks fire, and what they change outside of these is
    not known.
    """
    parameters = _parameters(model, optimizer)
    with ExitStack() as kept:
        kept.callback(_RandomStreams().restore)
        kept.callback(_Gradients(parameters).restore)
        kept.callback(_Modules(model).restore)
        kept.callback(_Values([*parameters, *model.buffers()]).restore)
        if optimizer is not None:
            kept.callback(_OptimizerState(optimizer).restore)
        if grad_scaler is not None:
            kept.callback(_Entries(vars(grad_scaler)).restore)
        yield


def _parameters(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    """Every parameter of either, once."""
    groups = [] if optimizer is None else optimizer.param_groups
    tensors = [*model.parameters(), *(parameter for group in groups for parameter in group["params"])]
    return list({id(tensor): tensor for tensor in tensors}.values())


class _Values:
    """The contents of tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        own = [_own_part(tensor) for tensor in tensors]
        self.copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in own]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, kept in self.copies:
                if not torch.equal(tensor.cpu(), kept):  # so that untouched tensors that overlap themselves stay
                    tensor.copy_(kept)


def _own_part(tensor: Tensor) -> Tensor:
    """The tensor, or this rank's part of a sharded one, in its memory."""
    to_local = getattr(tensor.detach(), "to_local", None)
    return tensor if to_local is None else to_local()


class _Modules:
    """Train/eval flags, and which tensors the modules hold under which names."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [
            (module, module.training, dict(module._parameters), dict(module._buffers)) for module in model.modules()
        ]

    def restore(self) -> None:
        for module, training, parameters, buffers in self.modules:
            module.training = training
            _replace_entries(module._parameters, parameters)
            _replace_entries(module._buffers, buffers)


class _Gradients:
    """Set aside, so that nothing accumulates into them."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.gradients = [(parameter, parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def restore(self) -> None:
        for parameter, gradient in self.gradients:
            parameter.grad = gradient


class _OptimizerState:
    """State by parameter, settings of the groups, and plain attributes (a wrapper counts its calls there)."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.states = {parameter: _Entries(state) for parameter, state in optimizer.state.items()}
        self.groups = [_Entries(group) for group in optimizer.param_groups]
        self.attributes = dict(vars(optimizer))

    def restore(self) -> None:
        for entries in [*self.states.values(), *self.groups]:
            entries.restore()
        for parameter in self.optimizer.state.keys() - self.states.keys():
            del self.optimizer.state[parameter]
        for parameter, entries in self.states.items():  # an optimizer may have put another dict there
            self.optimizer.state[parameter] = entries.entries
        _replace_entries(vars(self.optimizer), self.attributes)


class _Entries:
    """A dict of tensors and plain values, restored in place."""

    def __init__(self, entries: dict[Any, Any]) -> None:
        self.entries = entries
        own = {name: value for name, value in entries.items() if name != "params"}  # those are the model's
        self.values = _Values([leaf for leaf in tree_leaves(own) if isinstance(leaf, Tensor)])
        self.kept = {name: _copy_plain(value) for name, value in entries.items()}

    def restore(self) -> None:
        self.values.restore()
        _replace_entries(self.entries, self.kept)


def _copy_plain(value: Any) -> Any:
    """Tensors are restored in place; a list of them (the parameters of a group) stays a list of the same ones."""
    if isinstance(value, Tensor):
        return value
    if type(value) in (list, tuple) and any(isinstance(entry, Tensor) for entry in value):
        return type(value)(value)
    return copy.deepcopy(value)


def _replace_entries(entries: dict[Any, Any], kept: dict[Any, Any]) -> None:
    for name in entries.keys() - kept.keys():
        del entries[name]
    entries.update(kept)


class _RandomStreams:
    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self.python = random.getstate()
        self.numpy = numpy.random.get_state()

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
