"""The state that training changes in a model, an optimizer and the random streams."""

import copy
import pickle
import random

import numpy
import torch
from torch.utils._pytree import tree_leaves, tree_map


def everything(model, optimizer=None):
    plain = {} if optimizer is None else {name: each for name, each in vars(optimizer).items() if type(each) is int}
    found = tree_map(
        local_part,
        {
            "state": dict(model.state_dict()),
            "buffers": sorted(name for name, _ in model.named_buffers()),
            "modes": [module.training for module in model.modules()],
            "exchange": [vars(model).get(f"require_{name}") for name in ("forward_param_sync", "backward_grad_sync")],
            "flags": [parameter.requires_grad for parameter in model.parameters()],
            "gradients": [parameter.grad for parameter in model.parameters()],
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "attributes": None if optimizer is None else [sorted(vars(optimizer)), plain],
            "random": [
                torch.get_rng_state(),
                random.getstate(),
                numpy.random.get_state()[2],
                numpy.random.get_state()[1].tolist(),
            ],
        },
    )
    return copy.deepcopy(found)


def local_part(leaf):
    """This rank's part of a sharded tensor. A copy of the sharded tensor itself would share its memory."""
    return leaf.detach().to_local() if hasattr(leaf, "to_local") else leaf


def identities(model, optimizer=None):
    tensors = [*model.parameters(), *model.buffers(), *(parameter.grad for parameter in model.parameters())]
    states = [] if optimizer is None else tree_leaves([*optimizer.state.values(), optimizer.param_groups])
    return [id(tensor) for tensor in tensors + [value for value in states if isinstance(value, torch.Tensor)]]


def contents(value):
    """The bits of a tensor's memory and how it lies there, the entries of a container in their order, or a pickle."""
    if isinstance(value, torch.Tensor):
        dense = value.values() if value.is_nested else value
        steps = sum((size - 1) * stride for size, stride in zip(dense.shape, dense.stride(), strict=True))
        end = (dense.storage_offset() + steps + 1) * dense.element_size()
        return dense.untyped_storage().tolist()[:end], dense.dtype, dense.shape, dense.stride()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, dict):
        return [(name, contents(entry)) for name, entry in value.items()]
    if isinstance(value, (list, tuple)):
        return [contents(entry) for entry in value]
    return pickle.dumps(value)
