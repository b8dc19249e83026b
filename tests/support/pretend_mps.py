"""A pretended MPS: tensors that say device "mps:0", are computed on the CPU, and cannot be float64."""

from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from seqwarm_kernels.ops.alibi_attention import reference as attention
from seqwarm_kernels.ops.moment_statistics import reference as moments

MPS = torch.device("mps:0")  # with an index, for which torch would ask the device

_REFERENCES = vars(attention) | vars(moments)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
#: What asks the device before it calls operators.
_GUARDED = (
    Tensor.__getitem__,
    Tensor.__setitem__,
    Tensor.__invert__,
    Tensor.__int__,
    Tensor.contiguous,
    Tensor.copy_,
    Tensor.tolist,
)


@contextmanager
def pretended_mps():
    """In the block, tensors can be made on the pretended device and moved to it."""
    with _Operators(), _Functions():
        yield


class _Pretended(Tensor):
    @staticmethod
    def __new__(cls, held):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=MPS, **layout)

    def __init__(self, held):
        assert held.dtype != torch.float64, "MPS has no float64"
        self.held = held

    def __repr__(self):
        return f"on mps: {self.held}"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") is not None:  # no operator
            return func(*args, **kwargs | {"device": "cpu"}).to(kwargs["device"])
        if func in _GUARDED and any(isinstance(argument, _Pretended) for argument in args):
            return _pretended(func(*_held(args), **kwargs), args)
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args, kwargs):
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_on_mps = any(isinstance(tensor, _Pretended) for tensor in tensors)
    if is_on_mps and func not in _COPIES:
        assert all(isinstance(tensor, _Pretended) or not tensor.dim() for tensor in tensors), f"{func} of two devices"
    if is_on_mps and func.namespace == "seqwarm":
        with pretended_mps():
            return _REFERENCES[func._schema.name.removeprefix("seqwarm::")](*args, **kwargs)
    assert not (is_on_mps and kwargs.get("dtype") == torch.float64), "a copy casts on MPS"
    device = torch.device(kwargs.get("device") or (MPS if is_on_mps else "cpu"))
    if "device" in kwargs:
        kwargs = kwargs | {"device": "cpu"}
    result = func(*_held(args), **_held(kwargs))
    return _pretended(result, args) if device.type == "mps" else result


def _held(arguments):
    return tree_map(lambda leaf: leaf.held if isinstance(leaf, _Pretended) else leaf, arguments)


def _pretended(result, args):
    if args and isinstance(result, Tensor) and result is _held(args[0]):  # in place
        return args[0]
    return tree_map(lambda leaf: _Pretended(leaf) if isinstance(leaf, Tensor) else leaf, result)
