"""Packed sequences in every other implementation, against the reference in float64."""

from functools import partial

import pytest
import torch

from seqwarm_kernels import alibi_attention, alibi_attention_varlen
from tests.ops.test_attention_kernels import check_results, differentiate, exact_results, implementations
from tests.support.dense import distance_and_visibility
from tests.support.kernels import check_nan_is_unseen

on_everything = pytest.mark.parametrize(("backend", "device", "dtype"), list(implementations("alibi_attention_varlen")))

#: lengths of queries and keys, number of tokens outside of all sequences, options
CASES = {
    "few tokens": ([3, 20], [3, 20], 2, {}),  # first: Triton's interpreter runs it in `make test`
    "same lengths": ([30, 100, 3], [30, 100, 3], 0, {}),
    "empty sequences": ([0, 70, 0, 0, 9, 0], [0, 70, 0, 5, 9, 0], 0, {"causal": False}),
    "more keys": ([5, 90, 20], [80, 100, 150], 0, {}),
    "fewer keys": ([80, 100], [30, 1], 0, {"causal": False}),
    "far fewer keys": ([600, 10], [3, 9], 0, {"causal": False}),
    "many short ones": ([3, 8, 1, 5, 2, 7, 4] * 8, [3, 8, 1, 5, 2, 7, 4] * 8, 0, {}),
    "unused tokens": ([40, 70], [40, 70], 30, {}),
    "unused tokens, window": ([140, 20], [140, 20], 9, {"window": 25, "causal": False}),
    "dropout": ([30, 60], [50, 60], 0, {"dropout_p": 0.3}),
    "starts, few tokens": ([3, 0, 4], [3, 2, 9], 2, {"query_start": torch.tensor([-1, 0, 20])}),
    "starts": ([5, 0, 90, 20, 70], [80, 6, 100, 0, 40], 3, {"query_start": torch.tensor([-2, 3, 50, 7, 200])}),
    "starts, full": ([5, 90, 20], [80, 100, 9], 0, {"query_start": torch.tensor([-300, 30, 70]), "causal": False}),
    "starts, window": (
        [70, 40],
        [200, 60],
        0,
        {"query_start": torch.tensor([90, -9], dtype=torch.int32), "window": 25},
    ),
    "one start": ([30, 60], [50, 60], 5, {"query_start": 0, "causal": False}),
    "one query each": ([1] * 9, [50, 3, 0, 9, 70, 1, 20, 33, 5], 0, {"query_start": torch.arange(9) * 5}),
    "starts, dropout": ([30, 60], [50, 60], 0, {"query_start": torch.tensor([5, 20]), "dropout_p": 0.3}),
    "no sequences": ([], [], 12, {}),
}


def packed(lengths, heads, unused, device, dtype):
    return torch.randn(sum(lengths) + unused, heads, 16, device=device).to(dtype)


@on_everything
def test_queries_of_sequences_without_enough_keys_may_hold_nan(backend, device, dtype):
    """The second sequence has no key, and the first two queries of the third are before its keys."""
    ends_q = torch.tensor([0, 5, 9, 20], dtype=torch.int32, device=device)
    ends_k = torch.tensor([0, 5, 5, 14], dtype=torch.int32, device=device)
    leaves = [torch.randn(tokens, 2, 16).to(device, dtype) for tokens in (20, 14, 14)]
    leaves.append(torch.tensor([0.5, 0.1], device=device))
    weights = torch.randn_like(leaves[0]), torch.randn(2, 20, device=device)

    def attend(leaves):
        *tensors, slopes = leaves
        return alibi_attention_varlen(
            *tensors, ends_q, ends_k, 11, 9, slopes, return_lse=True, backend=backend, causal=True
        )

    blind = torch.zeros(20, 1, 1, dtype=torch.bool, device=device)
    blind[5:11] = True
    check_nan_is_unseen(attend, leaves, weights, queries=blind)


#: Starts and window. The first are those without starts.
HIDDEN_KEYS = {
    "window": (None, 20),
    "starts": (torch.tensor([40, 60, 6, -5]), None),
    "starts and window": (torch.tensor([40, 60, 6, 300]), 20),
}


@pytest.mark.parametrize("name", HIDDEN_KEYS)
@on_everything
def test_keys_that_no_query_sees_may_hold_nan(backend, device, dtype, name):
    """As those in the unused slots of a cache, and those of a sequence without a query."""
    lengths_q, lengths_k = [3, 70, 0, 5], [100, 130, 6, 30]
    starts, window = HIDDEN_KEYS[name]
    options = {"query_start": None if starts is None else starts.to(device), "window": window}
    starts = torch.tensor(lengths_k) - torch.tensor(lengths_q) if starts is None else starts
    unseen = ~torch.cat(
        [
            distance_and_visibility(1, queries, keys, query_start=start, window=window)[1][0].any(0)
            for queries, keys, start in zip(lengths_q, lengths_k, starts.tolist(), strict=True)
        ]
    )
    leaves = [torch.randn(sum(lengths), 2, 16).to(device, dtype) for lengths in (lengths_q, lengths_k, lengths_k)]
    ends = [torch.tensor([0, *lengths], device=device).cumsum(0).int() for lengths in (lengths_q, lengths_k)]
    leaves.append(torch.tensor([0.5, 0.01], device=device))
    weights = torch.randn_like(leaves[0]), torch.randn(2, 78, device=device)

    def attend(leaves):
        *tensors, slopes = leaves
        return alibi_attention_varlen(*tensors, *ends, 70, 130, slopes, **options, return_lse=True, backend=backend)

    check_nan_is_unseen(attend, leaves, weights, keys=unseen[:, None, None].to(device))


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("name", CASES)
@on_everything
def test_outputs_and_gradients_stay_inside_the_budget(backend, device, dtype, name, by_sequence):
    check_case(backend, device, dtype, CASES[name], by_sequence)


def check_case(backend, device, dtype, case, by_sequence):
    lengths_q, lengths_k, unused, options = case
    if isinstance(options.get("query_start"), torch.Tensor):
        options = options | {"query_start": options["query_start"].to(device)}
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

    def attend(leaves, backend="reference"):
        torch.manual_seed(5)
        *tensors, slopes = leaves
        return alibi_attention_varlen(
            *tensors, *cu_seqlens, *longest, slopes, return_lse=True, skip_tolerance=0, backend=backend, **options
        )

    weights = torch.randn(tensors[0].shape, device=device), torch.randn(tensors[0].shape[:2], device=device).T
    exact = exact_results(attend, [*tensors, slopes], weights)
    if unused:  # tokens outside of all sequences affect no output
        for tensor in tensors:
            tensor[-unused:] = float("nan")
    leaves = [tensor.requires_grad_() for tensor in (*tensors, slopes)]
    results = differentiate(partial(attend, backend=backend), leaves, weights)
    check_results(exact, results, dtype)
    if unused:
        out, _, *gradients = results
        assert (out[-unused:] == 0).all()
        assert all((gradient[-unused:] == 0).all() for gradient in gradients[:3])


@pytest.mark.parametrize("start", [2**60, 2**45 + 1, -(2**60)])
@pytest.mark.parametrize("causal", [True, False])
@on_everything
def test_positions_far_from_all_keys(backend, device, dtype, start, causal):
    """Equal to the rows of a batch, also in gradients."""
    tensors = [torch.randn(2, 2, 150, 16).to(device, dtype) for _ in range(3)]
    slopes = torch.tensor([3 / abs(start), 0.3], device=device)
    options = {"query_start": torch.tensor([start, 3], device=device), "causal": causal, "return_lse": True}
    weights = torch.randn(2, 2, 150, 16, device=device), torch.randn(2, 2, 150, device=device)
    ends = torch.tensor([0, 150, 300], dtype=torch.int32, device=device)

    def flat(tensor):
        return tensor.transpose(1, 2).flatten(0, 1)

    def attend_packed(leaves):
        *rows, slopes = leaves
        rows = [flat(row) for row in rows]
        out, lse = alibi_attention_varlen(*rows, ends, ends, 150, 150, slopes, **options, backend=backend)
        return out.unflatten(0, (2, 150)).transpose(1, 2), lse.unflatten(1, (2, 150)).transpose(0, 1)

    exact = exact_results(
        lambda leaves: alibi_attention(*leaves, **options, backend="reference"), [*tensors, slopes], weights
    )
    leaves = [tensor.clone().requires_grad_() for tensor in (*tensors, slopes)]
    check_results(exact, differentiate(attend_packed, leaves, weights), dtype)
