"""No call depends on torch's default device and dtype."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, alibi_slopes, resize_batch
from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.library import overload

from ..support.defaults import other_defaults


def attend(backend):
    tensors = [*(torch.randn(1, 1, 9, 4, requires_grad=True) for _ in range(3)), alibi_slopes(1).requires_grad_()]
    mask = torch.rand(1, 9) > 0.2
    return lambda: results_of(alibi_attention, tensors, key_padding_mask=mask, dropout_p=0.2, backend=backend)


def attend_varlen(backend):
    tensors = [torch.randn(7, 1, 4, requires_grad=True) for _ in range(3)]
    slopes, ends = alibi_slopes(1).requires_grad_(), torch.tensor([0, 3, 7], dtype=torch.int32)

    def attend(query, key, value, slopes, **options):
        return alibi_attention_varlen(query, key, value, ends, ends, 4, 4, slopes, **options)

    return lambda: results_of(attend, [*tensors, slopes], query_start=1, dropout_p=0.2, backend=backend)


def results_of(attend, tensors, **options):
    torch.manual_seed(0)
    out = attend(*tensors, **options)
    return [out, *torch.autograd.grad(out.sum(), tensors)]


def resize(backend):
    batch = {"input_ids": torch.arange(20).view(2, 10), "attention_mask": torch.ones(2, 10), "x": torch.rand(2, 10)}
    out = {name: tensor.clone() for name, tensor in batch.items()}
    every = {}, {"mode": "reshape", "remainder": "pad"}, {"keep_last_token": True}, {"out": out}
    return lambda: [resize_batch(batch, 4, return_info=True, backend=backend, **options) for options in every]


def resize_packed(backend):
    batch = {"input_ids": torch.arange(9)[None], "labels": torch.arange(9)[None], "cu_seqlens": torch.tensor([0, 5, 9])}
    batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    every = {}, {"mode": "reshape", "remainder": "overlap"}
    return lambda: [resize_batch(batch, 3, return_info=True, backend=backend, **options) for options in every]


def statistics(backend):
    tensors = [torch.rand(5), torch.rand(3)]
    return lambda: overload("moment_statistics", backend)(tensors, tensors, tensors)


CALLS = {
    "alibi_attention": attend,
    "alibi_attention_varlen": attend_varlen,
    "resize_batch": resize,
    "resize_packed": resize_packed,
    "moment_statistics": statistics,
}


@pytest.mark.parametrize("backend", backends.BACKENDS)
@pytest.mark.parametrize("operator", CALLS)
def test_other_defaults_change_nothing(operator, backend):
    if backends.why_not(operator, backend, "cpu") is not None:
        pytest.skip(f"{operator} is not served by {backend} on cpu")
    call = CALLS[operator](backend)
    with other_defaults():  # first: some tensors are kept for later calls
        got = tree_leaves(call())
    expected = tree_leaves(call())
    for one, other in zip(got, expected, strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device)
        assert torch.equal(one, other)
