"""Packed sequences in every other implementation, against the reference in float64."""

import pytest
import torch

from seqwarm_kernels import alibi_attention_varlen
from tests.ops.test_attention_kernels import as_leaves, differentiate, implementations
from tests.support.kernels import assert_within_budget, slack

on_everything = pytest.mark.parametrize(("backend", "device", "dtype"), list(implementations("alibi_attention_varlen")))

#: lengths of queries and keys, number of tokens outside of all sequences, options
CASES = {
    "same lengths": ([30, 100, 3], [30, 100, 3], 0, {}),
    "empty sequences": ([0, 70, 0, 0, 9, 0], [0, 70, 0, 5, 9, 0], 0, {"causal": False}),
    "more keys": ([5, 90, 20], [80, 100, 150], 0, {}),
    "fewer keys": ([80, 100], [30, 1], 0, {"causal": False}),
    "many short ones": ([3, 8, 1, 5, 2, 7, 4] * 8, [3, 8, 1, 5, 2, 7, 4] * 8, 0, {}),
    "unused tokens": ([40, 70], [40, 70], 30, {}),
    "unused tokens, window": ([140, 20], [140, 20], 9, {"window": 25, "causal": False}),
    "dropout": ([30, 60], [50, 60], 0, {"dropout_p": 0.3}),
    "no sequences": ([], [], 12, {}),
}


def packed(lengths, heads, unused, device, dtype):
    return torch.randn(sum(lengths) + unused, heads, 16, device=device).to(dtype)


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("name", CASES)
@on_everything
def test_outputs_and_gradients_stay_inside_the_budget(backend, device, dtype, name, by_sequence):
    lengths_q, lengths_k, unused, options = CASES[name]
    stretch = 1 if device == "cpu" else 8
    lengths_q, lengths_k = [[length * stretch for length in lengths] for lengths in (lengths_q, lengths_k)]
    tensors = [
        packed(lengths, heads, unused, device, dtype)
        for lengths, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    ]
    slopes = torch.rand((len(lengths_q), 4) if by_sequence else (4,), device=device)
    cu_seqlens = [
        torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32) for lengths in (lengths_q, lengths_k)
    ]
    longest = max(lengths_q, default=0), max(lengths_k, default=0)

    def attend(leaves, backend):
        torch.manual_seed(5)
        *tensors, slopes = leaves
        return alibi_attention_varlen(
            *tensors, *cu_seqlens, *longest, slopes, return_lse=True, skip_tolerance=0, backend=backend, **options
        )

    clean = as_leaves([*tensors, slopes], torch.float64)
    exact, exact_lse = attend(clean, "reference")
    single = as_leaves([*tensors, slopes], torch.float32)
    plain, plain_lse = attend(single, "reference")
    if unused:  # tokens outside of all sequences affect no output
        for tensor in tensors:
            tensor[-unused:] = float("nan")
    leaves = [tensor.requires_grad_() for tensor in (*tensors, slopes)]
    out, lse = attend(leaves, backend)
    weights, lse_weights = torch.randn_like(exact), torch.randn_like(exact_lse)
    gradients = differentiate(out, lse, leaves, weights, lse_weights)
    wanted = differentiate(exact, exact_lse, clean, weights, lse_weights)
    expected = differentiate(plain, plain_lse, single, weights, lse_weights)

    seen = exact_lse.isfinite()
    assert (lse.isfinite() == seen).all()
    times = slack(backend, device)
    assert_within_budget("lse", lse[seen], exact_lse[seen], plain_lse[seen], torch.float32, times)
    names = ("out", "grad_query", "grad_key", "grad_value", "grad_slopes")
    for what, got, want, other in zip(names, (out, *gradients), (exact, *wanted), (plain, *expected), strict=True):
        assert_within_budget(what, got, want, other, dtype, times)
    if unused:
        assert (out[-unused:] == 0).all()
        assert all((gradient[-unused:] == 0).all() for gradient in gradients[:3])
