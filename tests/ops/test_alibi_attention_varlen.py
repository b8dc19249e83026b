"""Packed sequences against the same sequences attended separately."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import alibi_attention, alibi_attention_varlen
from tests.support.attention_cases import PackedCase
from tests.support.backends import serving
from tests.support.tiers import examples

pytestmark = pytest.mark.parametrize("backend", serving("alibi_attention_varlen", torch.float64))


@st.composite
def packed_cases(draw):
    number = draw(st.integers(0, 4))
    lengths = st.lists(st.integers(0, 6), min_size=number, max_size=number)
    start = st.integers(-4, 9)
    starts = draw(st.none() | start | st.lists(start, min_size=number, max_size=number))
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(0, 4)),
        "query_start": torch.tensor(starts, dtype=torch.int64) if isinstance(starts, list) else starts,
    }
    slopes = draw(st.sampled_from(["random", "by row", None]))
    torch.manual_seed(draw(st.integers(0, 1000)))
    return PackedCase((draw(lengths), draw(lengths)), options=options, head_dim=5, slopes=slopes)


def attend_one_by_one(leaves, case):
    """out (T, H, D) and lse (T, H)"""
    query, key, value, slopes = leaves
    options, starts = dict(case.options), case.options["query_start"]
    outs, sums = [query.new_zeros(0, *query.shape[1:])], [query.new_zeros(0, query.shape[1])]
    lengths_q, lengths_k = case.lengths
    parts = zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True)
    for index, part in enumerate(parts):
        options["query_start"] = starts[index] if isinstance(starts, torch.Tensor) else starts
        row = [tensor.transpose(0, 1)[None] for tensor in part]
        own = slopes if slopes.dim() == 1 else slopes[index]
        out, lse = alibi_attention(*row, own, return_lse=True, backend="reference", **options)
        outs.append(out[0].transpose(0, 1))
        sums.append(lse[0].T)
    return torch.cat(outs), torch.cat(sums)


@examples(30)
@given(case=packed_cases())
def test_equals_the_sequences_one_by_one(backend, case):
    leaves, attend = case.call("cpu", torch.float64)
    leaves = [leaf.double().requires_grad_() for leaf in leaves]
    out, lse = attend(leaves, backend)
    expected, expected_lse = attend_one_by_one(leaves, case)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)

    weights, seen = torch.randn_like(out), lse.isfinite()
    got = torch.autograd.grad((out * weights).sum() + lse[seen].sum(), leaves)
    objective = (expected * weights).sum() + expected_lse[seen].sum()
    wanted = torch.autograd.grad(objective, leaves, allow_unused=True) if objective.requires_grad else [None] * 4
    for gradient, want, leaf in zip(got, wanted, leaves, strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(leaf) if want is None else want, rtol=1e-11, atol=1e-11)


def test_gradcheck_of_dropout(backend):
    case = PackedCase(([3, 0, 4], [5, 1, 4]), 0, {"window": 3, "dropout_p": 0.3}, 3, "by row")
    leaves, attend = case.call()

    def attend_seeded(*leaves):
        torch.manual_seed(1)
        out, lse = attend(leaves, backend)
        return out, lse.nan_to_num(neginf=0)

    assert torch.autograd.gradcheck(attend_seeded, [leaf.double().requires_grad_() for leaf in leaves], fast_mode=True)


def test_dropout_differs_between_sequences(backend):
    query, ends = torch.ones(16, 2, 3, dtype=torch.float64), torch.tensor([0, 8, 16], dtype=torch.int32)
    out = alibi_attention_varlen(query, query, query, ends, ends, 8, 8, torch.zeros(2), dropout_p=0.5, backend=backend)
    assert not torch.equal(out[:8], out[8:])
