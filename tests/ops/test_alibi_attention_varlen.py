"""Packed sequences against the same sequences attended separately."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import alibi_attention, alibi_attention_varlen
from tests.support.backends import serving
from tests.support.tiers import examples

pytestmark = pytest.mark.parametrize("backend", serving("alibi_attention_varlen", torch.float64))


def cumulated(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed_inputs(lengths_q, lengths_k, heads=(4, 2), head_dim=5, unused=0):
    query = torch.randn(sum(lengths_q) + unused, heads[0], head_dim, dtype=torch.float64, requires_grad=True)
    key = torch.randn(sum(lengths_k) + unused, heads[1], head_dim, dtype=torch.float64, requires_grad=True)
    value = torch.randn(sum(lengths_k) + unused, heads[1], head_dim, dtype=torch.float64, requires_grad=True)
    return query, key, value


def attend_packed(inputs, lengths_q, lengths_k, slopes, **options):
    longest = max(lengths_q, default=0), max(lengths_k, default=0)
    return alibi_attention_varlen(
        *inputs, cumulated(lengths_q), cumulated(lengths_k), *longest, slopes, return_lse=True, **options
    )


def attend_one_by_one(inputs, lengths_q, lengths_k, slopes, starts=None, **options):
    query, key, value = inputs
    outs, sums = [torch.zeros(0, *query.shape[1:], dtype=query.dtype)], [torch.zeros(query.shape[1], 0)]
    parts = zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True)
    for index, part in enumerate(parts):
        row = [tensor.transpose(0, 1)[None] for tensor in part]
        own = slopes if slopes.dim() == 1 else slopes[index]
        start = starts[index] if isinstance(starts, list) else starts
        out, lse = alibi_attention(*row, own, query_start=start, return_lse=True, backend="reference", **options)
        outs.append(out[0].transpose(0, 1))
        sums.append(lse[0])
    return torch.cat(outs), torch.cat(sums, 1)


@examples(60)
@given(data=st.data())
def test_equals_the_sequences_one_by_one(backend, data):
    draw = data.draw
    num_sequences = draw(st.integers(0, 4))
    lengths_q = draw(st.lists(st.integers(0, 6), min_size=num_sequences, max_size=num_sequences))
    lengths_k = draw(
        st.one_of(st.just(lengths_q), st.just([length + 2 for length in lengths_q]), st.just(lengths_q[::-1]))
    )
    torch.manual_seed(draw(st.integers(0, 1000)))
    inputs = packed_inputs(lengths_q, lengths_k)
    slopes = torch.randn(draw(st.sampled_from([(4,), (num_sequences, 4)])), dtype=torch.float64, requires_grad=True)
    options = {"causal": draw(st.booleans()), "window": draw(st.none() | st.integers(0, 4))}
    start = st.integers(-4, 9)
    starts = draw(st.none() | start | st.lists(start, min_size=num_sequences, max_size=num_sequences))
    query_start = torch.tensor(starts, dtype=torch.int64) if isinstance(starts, list) else starts

    out, lse = attend_packed(inputs, lengths_q, lengths_k, slopes, backend=backend, query_start=query_start, **options)
    expected, expected_lse = attend_one_by_one(inputs, lengths_q, lengths_k, slopes, starts=starts, **options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse.to(lse.dtype), rtol=1e-12, atol=1e-12)

    weights, seen = torch.randn_like(out), lse.isfinite()
    leaves = [*inputs, slopes]
    got = torch.autograd.grad((out * weights).sum() + lse[seen].sum(), leaves)
    objective = (expected * weights).sum() + expected_lse[seen].sum()
    wanted = torch.autograd.grad(objective, leaves, allow_unused=True) if objective.requires_grad else [None] * 4
    for gradient, want, leaf in zip(got, wanted, leaves, strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(leaf) if want is None else want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_training_on_packed_sequences_and_decoding_one_query_at_a_time_agree(backend, causal):
    """Cross-attention: each sequence has keys of its own length, and queries that count from its first key."""
    lengths_q, lengths_k = [6, 4], [9, 5]
    query, key, value = (tensor.detach() for tensor in packed_inputs(lengths_q, lengths_k))
    slopes = torch.rand(4, dtype=torch.float64)
    options = {"causal": causal, "backend": backend}
    trained, _ = attend_packed((query, key, value), lengths_q, lengths_k, slopes, query_start=0, **options)
    for step in range(4):
        now = torch.cat([query[step : step + 1], query[6 + step : 7 + step]])
        starts = torch.tensor([step, step])
        decoded, _ = attend_packed((now, key, value), [1, 1], lengths_k, slopes, query_start=starts, **options)
        torch.testing.assert_close(decoded, trained[[step, 6 + step]], rtol=1e-12, atol=1e-12)


def test_gradcheck(backend):
    lengths_q, lengths_k = [3, 0, 4], [5, 1, 4]
    inputs = packed_inputs(lengths_q, lengths_k, head_dim=3)
    slopes = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)

    def attend(query, key, value, slopes):
        torch.manual_seed(1)
        return attend_packed(
            (query, key, value), lengths_q, lengths_k, slopes, window=3, dropout_p=0.3, backend=backend
        )

    assert torch.autograd.gradcheck(attend, (*inputs, slopes))


def test_tokens_of_no_sequence_give_zeros(backend):
    inputs = packed_inputs([3], [3], unused=2)
    out, lse = attend_packed(inputs, [3], [3], torch.rand(4, dtype=torch.float64), backend=backend)
    assert (out[3:] == 0).all()
    assert (lse[:, 3:] == float("-inf")).all()
    (grad_value,) = torch.autograd.grad(out.sum(), [inputs[2]])
    assert (grad_value[3:] == 0).all()


def test_dropout_differs_between_sequences(backend):
    query, key, value = (torch.ones(16, 2, 3, dtype=torch.float64) for _ in range(3))
    slopes = torch.zeros(2, dtype=torch.float64)
    out, _ = attend_packed((query, key, value), [8, 8], [8, 8], slopes, dropout_p=0.5, backend=backend)
    assert not torch.equal(out[:8], out[8:])
