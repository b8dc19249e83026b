"""The semantics of alibi_attention, for backends with float64. test_attention_kernels.py tests the others."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import alibi_attention, alibi_bias, alibi_slopes
from tests.support.attention_cases import cases
from tests.support.backends import serving
from tests.support.dense import dense_attention, distance_and_visibility
from tests.support.tiers import examples

pytestmark = pytest.mark.parametrize("backend", serving("alibi_attention", torch.float64))


def random_inputs(batch_size=2, heads=(4, 2), lengths=(7, 9), head_dim=5, dtype=torch.float64):
    shapes = [(batch_size, heads[place], lengths[place], head_dim) for place in (0, 1, 1)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


LENGTHS = st.integers(0, 9)


@examples(40)
@given(
    case=cases(st.tuples(LENGTHS, LENGTHS) | LENGTHS.map(lambda length: (length, length)), batch_size=st.integers(0, 2))
)
def test_outputs_and_gradients_match_the_dense_computation(backend, case):
    leaves, options = replace(case, options={**case.options, "dropout_p": 0.0}).inputs(dtype=torch.float64)
    leaves = [leaf.double().requires_grad_() for leaf in leaves]
    query, key, value, slopes = leaves
    out, lse = alibi_attention(*leaves, return_lse=True, backend=backend, **options)
    rules = {name: given for name, given in options.items() if name not in ("scale", "dropout_p", "skip_tolerance")}
    distance, visible = distance_and_visibility(query.shape[0], query.shape[2], key.shape[2], **rules)
    expected, expected_lse = dense_attention(query, key, value, slopes, distance, visible, scale=options["scale"])
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(lse, expected_lse, **close)

    seen = lse.isfinite()
    weights, lse_weights = torch.randn_like(out), torch.randn_like(lse)[seen]
    gradients = torch.autograd.grad((out * weights).sum() + (lse[seen] * lse_weights).sum(), leaves)
    objective = (expected * weights).sum() + (expected_lse[seen] * lse_weights).sum()
    wanted = torch.autograd.grad(objective, leaves, allow_unused=True) if objective.requires_grad else [None] * 4
    for gradient, want, leaf in zip(gradients, wanted, leaves, strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(leaf) if want is None else want, rtol=1e-11, atol=1e-11)


def test_gradcheck_of_everything_combined(backend):
    inputs = random_inputs(batch_size=2, heads=(4, 2), lengths=(6, 6), head_dim=3)
    slopes = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 0, 1]], dtype=torch.bool)

    def attend(query, key, value, slopes, **options):
        torch.manual_seed(1)
        out, lse = alibi_attention(
            query, key, value, slopes, key_padding_mask=mask, return_lse=True, backend=backend, **options
        )
        return out, lse.masked_fill(lse.isinf(), 0)

    for options in ({"window": 2, "segment_length": 4}, {"window": 4, "query_start": 1, "causal": False}):
        function = partial(attend, dropout_p=0.4, **options)
        assert torch.autograd.gradcheck(function, (*inputs, slopes), fast_mode=True)


def test_default_slopes_and_scale(backend):
    query, key, value = random_inputs(heads=(4, 4), lengths=(5, 5))
    biased = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=alibi_bias(alibi_slopes(4).double(), 5, 5)
    )
    torch.testing.assert_close(alibi_attention(query, key, value, backend=backend), biased, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_stays_inside_its_error_budget(backend, dtype):
    inputs = random_inputs(lengths=(65, 65), head_dim=256, dtype=dtype)
    slopes = alibi_slopes(4).requires_grad_()
    out, lse = alibi_attention(*inputs, slopes, return_lse=True, backend=backend)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in [*inputs, slopes]]
    exact = alibi_attention(*exact_inputs, backend="reference")
    weights = torch.randn_like(exact)
    gradients = torch.autograd.grad((out * weights.to(dtype)).sum(), [*inputs, slopes])
    wanted = torch.autograd.grad((exact * weights.to(dtype)).sum(), exact_inputs)
    # float32 accumulates over at most 65 keys, 256 channels and 2 x 65 rows; the result is rounded once to dtype
    for got, want in zip([out, *gradients], [exact, *wanted], strict=True):
        budget = (torch.finfo(got.dtype).eps + 64 * torch.finfo(torch.float32).eps) * want.abs().max().item()
        assert (got.double() - want).abs().max().item() <= budget


def test_dropout_is_reproducible_and_unbiased(backend):
    query, key, value = (tensor.detach() for tensor in random_inputs(heads=(4, 4), lengths=(40, 40)))
    value = torch.ones_like(value)
    torch.manual_seed(3)
    first = alibi_attention(query, key, value, dropout_p=0.25, backend=backend)
    second = alibi_attention(query, key, value, dropout_p=0.25, backend=backend)
    torch.manual_seed(3)
    again = alibi_attention(query, key, value, dropout_p=0.25, backend=backend)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[:, 0], first[:, 1])
    draws = [alibi_attention(query, key, value, dropout_p=0.25, backend=backend).mean() for _ in range(20)]
    assert torch.stack(draws).mean().item() == pytest.approx(1, abs=0.02)
