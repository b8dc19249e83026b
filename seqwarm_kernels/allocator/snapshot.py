"""Save everything that training changes in a model, an optimizer and the random streams, and restore it."""

from __future__ import annotations

import copy
import os
import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from .distributed import reshard
from .memory import HostMemory
from .pinned_buffers import PinnedBuffers
from .places import Place, has_place
from .report import mebibytes

#: Elements that are summed at a time.
_PIECE = 2**22
#: The odd factors of SplitMix64's finalizer (Steele et al., OOPSLA 2014), as signed integers.
_MIXERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
#: By bytes of an element. Larger ones are read as several integers.
_INTEGERS = {1: torch.int8, 2: torch.int16}
#: Dicts in attributes that are restored. Others may do more than to hold entries.
_DICTS = (dict, OrderedDict, defaultdict)
#: Packages whose modules keep their attributes. Wrappers such as DistributedDataParallel count their calls in them.
_WRAPPERS = {"torch", "deepspeed"}
#: Of tensors in errors.
_UNNAMED = "a tensor in an attribute or of the optimizer"
#: Types of values that hold nothing to restore.
_PLAIN = {int, float, complex, bool, str, bytes, type(None)}


@contextmanager
def restore_afterwards(
    model: nn.Module, optimizer: Optimizer | None = None, grad_scaler: GradScaler | None = None
) -> Iterator[None]:
    """Restore everything bit for bit at the end of the block, also after an exception.

    Restored are parameters, buffers, gradients (None inside the block), train/eval flags, state and settings of the
    optimizer, the gradient scaler, and the random streams of torch (CPU and every CUDA device), Python and NumPy. Of an
    optimizer and of modules whose classes are not torch's or DeepSpeed's, attributes are restored with the tensors,
    lists, dicts, sets and torch.Generators in them, and so are optimizers among them. Copies are kept in host memory.
    Tensors stay the same objects, and get their shapes and their memory back, also memory that they share. Hooks run,
    and their other changes are not restored. Nor are changes inside of other objects that are attributes.

    Parameters that are frozen and not in the optimizer are not copied.

    Raises:
        RuntimeError: At the end, if the block has changed such a parameter, or if a tensor cannot be restored. All
            others are.
    """
    reshard(model)  # parameters stay unsharded after a forward without a backward
    parameters = _parameters(model, optimizer)
    with ExitStack() as stack:
        stack.callback(_RandomStreams().restore)
        stack.callback(_Gradients(parameters).restore)
        stack.callback(_Modules(model).restore)
        stack.callback(_Frozen(model, optimizer).check)
        stack.callback(_Values(_changing(model, optimizer, grad_scaler), _names(model)).restore)
        for each in optimizers_in(optimizer):
            stack.callback(_OptimizerState(each).restore)
        if grad_scaler is not None:
            stack.callback(_Entries(vars(grad_scaler)).restore)
        stack.callback(reshard, model)
        yield


def check_host_memory(
    model: nn.Module, optimizer: Optimizer | None = None, grad_scaler: GradScaler | None = None
) -> None:
    """Raise MemoryError if the copies of `restore_afterwards` do not fit into the available memory of the host."""
    tensors = _changing(model, optimizer, grad_scaler)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun; each makes copies
    parts = [part for part in map(_local_part, tensors) if part.layout == torch.strided]  # others have no nbytes
    needed = processes * sum(part.nbytes for part in parts)
    available, total = HostMemory().free()
    if total != 0 and needed > available:
        raise MemoryError(
            "warmup_allocator keeps copies of parameters, buffers and optimizer state in host memory: "
            f"{mebibytes(needed)} for {processes} processes, but {mebibytes(available)} are available. "
            "Without optimizer state less is copied: call warmup_allocator before the first step"
        )


def _changing(
    model: nn.Module, optimizer: Optimizer | None = None, grad_scaler: GradScaler | None = None
) -> list[Tensor]:
    """Return the tensors that a training step may change, each once."""
    state: list[Any] = [] if grad_scaler is None else [vars(grad_scaler)]
    for each in optimizers_in(optimizer):
        state += [*each.state.values(), *each.param_groups, vars(each)]
    attributes = [value for module in _own_modules(model) for value in _contents(vars(module)) if _has_memory(value)]
    tensors = [*_parameters(model, optimizer), *model.buffers(), *tree_leaves(state), *attributes]
    frozen = {id(parameter) for parameter in _frozen(model, optimizer).values()}
    unique = {id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)}
    return [tensor for key, tensor in unique.items() if key not in frozen]


def _names(model: nn.Module) -> dict[int, str]:
    """Return the names of parameters and buffers, by id."""
    return {id(tensor): name for name, tensor in chain(model.named_parameters(), model.named_buffers())}


def _frozen(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return the parameters without a gradient that are not in the optimizer."""
    stepped = {id(parameter) for group in _groups(optimizer) for parameter in group["params"]}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and id(parameter) not in stepped and _is_plain(_local_part(parameter))
    }


def _groups(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    return [group for each in optimizers_in(optimizer) for group in each.param_groups]


def _parameters(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    """Return the parameters of the model and the optimizer, each once."""
    tensors = [*model.parameters(), *(parameter for group in _groups(optimizer) for parameter in group["params"])]
    return list({id(tensor): tensor for tensor in tensors}.values())


def optimizers_in(optimizer: Optimizer | None) -> list[Optimizer]:
    """Return the optimizer and those in its attributes, each once, as in wrappers and ZeroRedundancyOptimizer."""
    found: list[Optimizer] = []
    waiting = [] if optimizer is None else [optimizer]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.append(each)
            waiting += [value for value in _contents(vars(each)) if isinstance(value, Optimizer)]
    return found


def _contents(container: Any) -> Iterator[Any]:
    """Yield a list, tuple or dict and everything in it but plain values, also in further ones, each object once."""
    found: dict[int, Any] = {}
    waiting = [container]
    while waiting:
        value = waiting.pop()
        if id(value) not in found:
            found[id(value)] = value
            if isinstance(value, (list, tuple, dict)):
                entries = value.values() if isinstance(value, dict) else value
                waiting += [entry for entry in entries if type(entry) not in _PLAIN]
    yield from found.values()


def _own_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of classes from outside of torch, whose attributes a forward may change."""
    return [
        module
        for module in model.modules()
        if any(
            issubclass(kind, nn.Module) and kind.__module__.partition(".")[0] not in _WRAPPERS
            for kind in type(module).__mro__
        )
    ]


def _has_memory(value: object) -> bool:
    """Return False for nested tensors, those on the meta device, views of parameters that are not gathered, and others
    than tensors.
    """
    if not isinstance(value, Tensor) or value.is_meta or value.is_nested:
        return False
    return value.layout != torch.strided or value.untyped_storage().nbytes() > 0


class _Values:
    """The contents of tensors, in pageable host memory.

    Args:
        tensors: Each once.
        names: Of tensors, by id, for errors.
    """

    def __init__(self, tensors: list[Tensor], names: Mapping[int, str] | None = None) -> None:
        local = [_local_part(tensor) for tensor in tensors]
        names = names or {}
        self.names = {id(part): names.get(id(each), _UNNAMED) for each, part in zip(tensors, local, strict=True)}
        self.places = [Place(tensor) for tensor in local if has_place(tensor)]
        on_gpu = [tensor for tensor in local if _is_on_gpu(tensor) and _is_plain(tensor) and tensor.is_contiguous()]
        self.on_gpu = [(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")) for tensor in on_gpu]
        self.buffers = PinnedBuffers() if on_gpu else None
        if self.buffers is not None:
            self.buffers.save(self.on_gpu)
        found = set(map(id, on_gpu))
        self.others = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in local if id(tensor) not in found]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore every tensor, also after an error.

        Raises:
            RuntimeError: At the end, with the first error and the names of the tensors that could not be restored.
        """
        failures: dict[int, Exception] = {}  # by id of the tensor
        for place in self.places:
            with _collected(failures, place.tensor):
                place.restore()
        for tensor, copied in _without(failures, self.others):
            with _collected(failures, tensor):
                if not _are_equal(tensor, copied):  # an unchanged tensor may overlap itself: no copy into it
                    tensor.copy_(copied)
        if self.buffers is not None:
            self.buffers.restore(_without(failures, self.on_gpu))
        if failures:
            first = next(iter(failures.values()))
            names = ", ".join(dict.fromkeys(self.names[key] for key in failures))
            raise RuntimeError(
                f"warmup_allocator could not restore {names}: {first}. Load it again; everything else is as before"
            ) from first


def _without(failures: dict[int, Exception], pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs whose first tensor has its shape: a copy into another could write beyond its storage."""
    return [pair for pair in pairs if id(pair[0]) not in failures]


@contextmanager
def _collected(failures: dict[int, Exception], tensor: Tensor) -> Iterator[None]:
    """Keep the first error of each tensor instead of raising it."""
    try:
        yield
    except Exception as error:
        failures.setdefault(id(tensor), error)


def _are_equal(tensor: Tensor, copied: Tensor) -> bool:
    """Compare a tensor with its copy in host memory, bit for bit where a tensor shows its bits. False if sparse."""
    if tensor.layout != torch.strided:
        return False
    tensor = tensor.detach().cpu()
    return torch.equal(_bits(tensor), _bits(copied)) if _is_plain(tensor) else torch.equal(tensor, copied)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, in one dimension."""
    flat = tensor.detach().reshape(-1)
    return flat.view(_INTEGERS.get(flat.element_size(), torch.int32))


class _Frozen:
    """The places of frozen parameters, and sums over their bits, computed on their device."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        frozen = _frozen(model, optimizer)
        self.places = [Place(tensor) for tensor in map(_local_part, frozen.values())]
        self.sums = [(name, tensor, _sum_of_bits(tensor)) for name, tensor in frozen.items()]

    def check(self) -> None:
        for place in self.places:
            place.restore()
        changed = [name for name, tensor, before in self.sums if not torch.equal(_sum_of_bits(tensor), before)]
        if changed:
            raise RuntimeError(
                "warmup_allocator makes no copies of parameters that are frozen and not in the optimizer, but the "
                f"model's forward or a hook has changed {', '.join(changed)}. Load them again. Make them buffers or "
                "add them to the optimizer, so that they are copied and restored"
            )


def _sum_of_bits(parameter: Tensor) -> Tensor:
    """Sum a tensor's bits as integers, with weights that look random.

    With regular weights, such as 1, 3, 5, 7, elements that are negated or swapped could leave the sum as it was.
    """
    bits = _bits(_local_part(parameter))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in bits.split(_PIECE):
        weights = torch.arange(1, len(piece) + 1, device=piece.device)
        for factor in _MIXERS:
            weights *= factor
            weights ^= weights >> 29
        total = 3 * total + (piece * weights).sum()
    return total


def _local_part(tensor: Tensor) -> Tensor:
    """Return the tensor, or a view of this rank's part of a sharded tensor."""
    to_local = getattr(tensor.detach(), "to_local", None)
    return tensor if to_local is None else to_local()


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _is_plain(tensor: Tensor) -> bool:
    """Return False for tensors whose memory cannot be viewed as integers: of other classes, quantized, sparse."""
    strided = tensor.layout == torch.strided and not tensor.is_quantized
    return type(tensor) in (Tensor, nn.Parameter) and strided and not tensor.is_conj() and not tensor.is_neg()


class _Modules:
    """Train/eval flags, the names of the tensors in each module, and attributes."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [
            (module, module.training, dict(module._parameters), dict(module._buffers)) for module in model.modules()
        ]
        self.attributes = [_Attributes(module) for module in _own_modules(model)]

    def restore(self) -> None:
        for module, training, parameters, buffers in self.modules:
            module.training = training
            _replace_entries(module._parameters, parameters)
            _replace_entries(module._buffers, buffers)
        for attributes in self.attributes:
            attributes.restore()


class _Gradients:
    """Gradients, and which parameters require one.

    The parameters have none until `restore`, so that nothing accumulates into the saved gradients.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self.gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def restore(self) -> None:
        for parameter, gradient, requires_grad in self.gradients:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient


class _OptimizerState:
    """State of each parameter, options of the groups, and attributes. Wrappers count their calls in an attribute."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.states = {parameter: _Entries(state) for parameter, state in optimizer.state.items()}
        self.groups = [_Entries(group) for group in optimizer.param_groups]
        self.attributes = _Attributes(optimizer)

    def restore(self) -> None:
        self.attributes.restore()
        for entries in [*self.states.values(), *self.groups]:
            entries.restore()
        for parameter in self.optimizer.state.keys() - self.states.keys():
            del self.optimizer.state[parameter]
        for parameter, entries in self.states.items():  # the optimizer may have replaced the dict
            self.optimizer.state[parameter] = entries.entries


class _Attributes:
    """Attributes of an object, and what lists, dicts, sets and generators in them hold.

    The contents of tensors are restored with those of the model.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.attributes = dict(vars(owner))
        contents = list(_contents(self.attributes))
        self.lists = [(value, list(value)) for value in contents if type(value) is list]
        self.dicts = [(value, dict(value)) for value in contents if type(value) in _DICTS]
        self.sets = [(value, set(value)) for value in contents if type(value) is set]
        self.generators = [(value, value.get_state()) for value in contents if isinstance(value, torch.Generator)]

    def restore(self) -> None:
        _replace_entries(vars(self.owner), self.attributes)
        for values, saved_values in self.lists:
            values[:] = saved_values
        for mapping, saved in self.dicts:
            _replace_entries(mapping, saved)
        for elements, saved_elements in self.sets:
            elements.clear()
            elements.update(saved_elements)
        for generator, state in self.generators:
            generator.set_state(state)


class _Entries:
    """The entries of a dict. The contents of their tensors are restored with those of the model."""

    def __init__(self, entries: dict[Any, Any]) -> None:
        self.entries = entries
        self.saved = {name: _copy_plain(value) for name, value in entries.items()}

    def restore(self) -> None:
        _replace_entries(self.entries, self.saved)


def _copy_plain(value: Any) -> Any:
    """Copy a value without its tensors, which are restored in place. Lists of tensors keep the same tensors."""
    if isinstance(value, Tensor):
        return value
    if type(value) in (list, tuple) and any(isinstance(entry, Tensor) for entry in value):
        return type(value)(value)
    return copy.deepcopy(value)


def _replace_entries(entries: dict[Any, Any], saved: dict[Any, Any]) -> None:
    for name in entries.keys() - saved.keys():
        del entries[name]
    entries.update(saved)


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
