"""The semantics of attention, for backends with float64. test_attention_kernels.py tests the others."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, alibi_bias, alibi_slopes
from tests.support.attention_cases import Case, PackedCase, cases, check_case
from tests.support.backends import serving
from tests.support.dense import dense_attention, distance_and_visibility
from tests.support.tiers import examples

pytestmark = pytest.mark.parametrize("backend", serving("alibi_attention", torch.float64))


def check(leaves, attend, expected_of):
    """out, lse and gradients of attend(leaves) beside those of expected_of(leaves)."""
    leaves = [leaf.double().requires_grad_() for leaf in leaves]
    results, expected = attend(leaves), expected_of(leaves)
    torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)
    seen = results[1].isfinite()
    weights = torch.randn_like(results[0]), torch.randn_like(results[1])[seen]

    def gradients(out, lse):
        objective = (out * weights[0]).sum() + (lse[seen] * weights[1]).sum()
        if not objective.requires_grad:  # no query sees a key
            return [torch.zeros_like(leaf) for leaf in leaves]
        return torch.autograd.grad(objective, leaves, allow_unused=True, materialize_grads=True)

    torch.testing.assert_close(gradients(*results), gradients(*expected), rtol=1e-11, atol=1e-11)


LENGTHS = st.integers(0, 9)


@examples(40)
@given(
    case=cases(st.tuples(LENGTHS, LENGTHS) | LENGTHS.map(lambda length: (length, length)), batch_size=st.integers(0, 2))
)
def test_outputs_and_gradients_match_the_dense_computation(backend, case):
    leaves, options = replace(case, options={**case.options, "dropout_p": 0.0}).inputs(dtype=torch.float64)
    rules = {name: given for name, given in options.items() if name not in ("scale", "dropout_p", "skip_tolerance")}
    distance, visible = distance_and_visibility(case.batch_size, *case.lengths, **rules)

    def attend(leaves):
        return alibi_attention(*leaves, return_lse=True, backend=backend, **options)

    check(leaves, attend, lambda leaves: dense_attention(*leaves, distance, visible, scale=options["scale"]))


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
def test_packed_sequences_equal_the_sequences_one_by_one(backend, case):
    leaves, attend = case.call("cpu", torch.float64)
    check(leaves, lambda leaves: attend(leaves, backend), lambda leaves: attend_one_by_one(leaves, case))


@pytest.mark.parametrize(
    "case",
    [
        Case({"window": 2, "segment_length": 4, "dropout_p": 0.4}, (6, 6), (4, 2), 2, 3, "by row", mask="random"),
        Case({"window": 4, "query_start": 1, "causal": False, "dropout_p": 0.4}, (6, 6), (4, 2), 2, 3, "by row"),
        PackedCase(([3, 0, 4], [5, 1, 4]), 0, {"window": 3, "dropout_p": 0.3}, 3, "by row"),
    ],
    ids=["segments", "both sides", "packed"],
)
def test_gradcheck_of_everything_combined(backend, case):
    leaves, attend = case.call()

    def attend_seeded(*leaves):
        torch.manual_seed(1)
        out, lse = attend(leaves, backend)
        return out, lse.nan_to_num(neginf=0)

    assert torch.autograd.gradcheck(attend_seeded, [leaf.double().requires_grad_() for leaf in leaves], fast_mode=True)


def test_default_slopes_and_scale(backend):
    query, key, value = torch.randn(3, 2, 4, 5, 6, dtype=torch.float64)
    biased = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=alibi_bias(alibi_slopes(4).double(), 5, 5)
    )
    torch.testing.assert_close(alibi_attention(query, key, value, backend=backend), biased, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_stays_inside_its_error_budget(backend, dtype):
    check_case(Case({}, (65, 65), (4, 2), 2, head_dim=256), backend, dtype=dtype)


def test_dropout_is_reproducible_and_unbiased(backend):
    query, key = torch.randn(2, 2, 4, 40, 5, dtype=torch.float64)

    def drop(seed=None):
        if seed is not None:
            torch.manual_seed(seed)
        return alibi_attention(query, key, torch.ones_like(key), dropout_p=0.25, backend=backend)

    first, second = drop(3), drop()
    assert torch.equal(drop(3), first)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[:, 0], first[:, 1])
    assert torch.stack([drop().mean() for _ in range(20)]).mean().item() == pytest.approx(1, abs=0.02)


def test_dropout_differs_between_sequences(backend):
    query, ends = torch.ones(16, 2, 3, dtype=torch.float64), torch.tensor([0, 8, 16], dtype=torch.int32)
    out = alibi_attention_varlen(query, query, query, ends, ends, 8, 8, torch.zeros(2), dropout_p=0.5, backend=backend)
    assert not torch.equal(out[:8], out[8:])
