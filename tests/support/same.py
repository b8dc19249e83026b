"""Nested values before and after a call."""

import torch
from torch.utils._pytree import tree_flatten


def assert_same(before, after):
    """Compare nested values bit for bit."""
    before_leaves, before_structure = tree_flatten(before)
    after_leaves, after_structure = tree_flatten(after)
    assert before_structure == after_structure
    for one, other in zip(before_leaves, after_leaves, strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other
