"""Transforms that differentiate: operators lack forward mode and torch.func, and refuse them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, alibi_slopes, resize_batch

NAMES = ["query", "key", "value", "slopes"]


def dense_inputs():
    return {name: torch.randn(1, 2, 8, 16) for name in NAMES[:3]} | {"slopes": alibi_slopes(2)}


def attend(inputs):
    return alibi_attention(**inputs)


def attend_packed(inputs):
    tensors = [inputs[name][0].transpose(0, 1) for name in NAMES[:3]]
    cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32)
    return alibi_attention_varlen(*tensors, cu_seqlens, cu_seqlens, 5, 5, inputs["slopes"])


def by_dual_tensor(function, tensor):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(tensor, torch.ones_like(tensor)))).tangent


def by_jvp(function, tensor):
    return torch.func.jvp(function, (tensor,), (torch.ones_like(tensor),))[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tangent", [by_dual_tensor, by_jvp])
@pytest.mark.parametrize("call", [attend, attend_packed])
def test_attention_refuses_tangents(call, tangent, name):
    inputs = dense_inputs()
    call(inputs)  # a known call is not checked again
    with pytest.raises(ValueError, match=name):
        tangent(lambda tensor: call(inputs | {name: tensor}), inputs[name])
    call(inputs)


def test_attention_in_vmap():
    inputs = dense_inputs()
    out = torch.func.vmap(lambda query: attend(inputs | {"query": query}))(inputs["query"][None])
    torch.testing.assert_close(out[0], attend(inputs), rtol=0, atol=0)


def test_compiled_attention_refuses_tangents():
    inputs = dense_inputs()
    tangent = partial(by_jvp, lambda query: attend(inputs | {"query": query}))
    compiled = torch.compile(tangent, backend="eager")
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=r"Observed exception|must have no tangent"):
        compiled(inputs["query"])


def resized(embeddings, **options):
    batch = {"input_ids": torch.arange(16).view(2, 8), "embeddings": embeddings}
    return resize_batch(batch, 4, **options)["embeddings"]


def resized_packed(embeddings):
    batch = {"input_ids": torch.arange(8)[None], "embeddings": embeddings}
    return resize_batch(batch | {"cu_seqlens": torch.tensor([0, 5, 8], dtype=torch.int32)}, 4)["embeddings"]


@pytest.mark.parametrize("tangent", [by_dual_tensor, by_jvp])
@pytest.mark.parametrize("mode", ["truncate", "reshape"])
def test_copies_of_a_batch_refuse_tangents(tangent, mode):
    embeddings = torch.randn(2, 8, 3)
    resized(embeddings, mode=mode)
    with pytest.raises(ValueError, match="embeddings"):
        tangent(partial(resized, mode=mode), embeddings)


@pytest.mark.parametrize("tangent", [by_dual_tensor, by_jvp])
def test_views_and_packed_batches_carry_tangents(tangent):
    assert torch.equal(tangent(partial(resized, copy=False), torch.randn(2, 8, 3)), torch.ones(2, 4, 3))
    assert torch.equal(tangent(resized_packed, torch.randn(1, 8, 3)), torch.ones(1, 7, 3))
