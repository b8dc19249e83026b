"""The public functions on pretended CUDA tensors: all that they compute with is on the device of the inputs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, alibi_slopes, resize_batch
from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.alibi_attention.schema import DenseOptions
from seqwarm_kernels.ops.library import overload


class Devices(TorchDispatchMode):
    """Notes the operators that make tensors on other devices than "cuda"."""

    def __init__(self):
        super().__init__()
        self.elsewhere = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, result)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cuda":
                self.elsewhere.append(f"{func}: {leaf.device}")
        return result


@pytest.fixture(autouse=True)
def devices():
    with FakeTensorMode(), Devices() as devices, torch.no_grad():
        yield
    assert not devices.elsewhere


def cuda(*shape, dtype=torch.float16):
    return torch.empty(shape, dtype=dtype, device="cuda")


DENSE = {
    "default": {},
    "mask": {"key_padding_mask": lambda: cuda(2, 10, dtype=torch.bool)},
    "dropout": {"dropout_p": lambda: 0.1},
    "query_start": {"query_start": lambda: cuda(2, dtype=torch.int64)},
    "slopes": {"slopes": lambda: cuda(2, 4)},
    "full": {"causal": lambda: False, "window": lambda: 3},
}


@pytest.mark.parametrize("options", DENSE.values(), ids=DENSE)
def test_attention(options):
    options = {name: make() for name, make in options.items()}
    out, lse = alibi_attention(cuda(2, 4, 10, 16), *[cuda(2, 2, 10, 16)] * 2, return_lse=True, **options)
    assert out.is_cuda
    assert lse.is_cuda


def test_packed_attention():
    ends = [cuda(3, dtype=torch.int32)] * 2
    assert alibi_attention_varlen(*[cuda(9, 4, 16)] * 3, *ends, 5, 5, dropout_p=0.1).is_cuda


@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_backward(backend):
    """Of the operator. Autograd would look for a real device."""
    query, key, slopes = cuda(2, 4, 10, 16), cuda(2, 2, 10, 16), cuda(4)
    given = query, key, key, slopes, *DenseOptions(None, None, None, 0, True, 0.5, None, None, 0.0, 0.0)
    outputs = overload("alibi_attention", backend)(*given)
    gradients = overload("alibi_attention_backward", backend)(outputs[0], None, *outputs, True, *given)
    assert [tuple(gradient.shape) for gradient in gradients] == [query.shape, key.shape, key.shape, slopes.shape]


def test_slopes():
    assert alibi_slopes(8, device="cuda").is_cuda


@pytest.mark.parametrize("mode", ["truncate", "reshape"])
def test_resize_batch(mode):
    batch = {name: cuda(4, 33, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}
    resized, info = resize_batch(batch, 8, mode=mode, return_info=True)
    assert all(tensor.is_cuda for tensor in tree_leaves((resized, tuple(info))))
