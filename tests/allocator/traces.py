"""The state that training changes in a model, an optimizer and the random streams."""

import copy
import random

import numpy
import torch
from torch.utils._pytree import tree_flatten, tree_map


def everything(model, optimizer=None):
    found = tree_map(
        local_part,
        {
            "state": dict(model.state_dict()),
            "buffers": sorted(name for name, _ in model.named_buffers()),
            "modes": [module.training for module in model.modules()],
            "gradients": [parameter.grad for parameter in model.parameters()],
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "attributes": None if optimizer is None else sorted(vars(optimizer)),
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
    states = [] if optimizer is None else [value for state in optimizer.state.values() for value in state.values()]
    return [id(tensor) for tensor in tensors + [value for value in states if isinstance(value, torch.Tensor)]]


def assert_same(before, after):
    """Compare nested values bit for bit."""
    before_leaves, before_structure = tree_flatten(before)
    after_leaves, after_structure = tree_flatten(after)
    assert before_structure == after_structure
    for one, other in zip(before_leaves, after_leaves, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
