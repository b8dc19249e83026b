"""Triton's attention kernels with small tiles: short rows of few heads reach every loop, in a second each."""

from types import SimpleNamespace

import pytest
import torch

from seqwarm_kernels import alibi_attention
from tests.support.backends import needs_interpreter
from tests.support.kernels import check_extreme_slopes
from tests.support.skipping import NEAR_AND_FAR_KEYS, check_within_reach
from tests.support.tiers import first_fast

pytestmark = [needs_interpreter(), pytest.mark.usefixtures("poisoned_memory", "small_tiles")]


@pytest.mark.parametrize("allowed", ["ieee", "tf32"])
def test_products_of_float32_take_tf32_only_if_torch_allows_it(monkeypatch, allowed):
    from triton.runtime.interpreter import InterpreterBuilder

    dot, precisions = InterpreterBuilder.create_dot, set()

    def noted(self, left, right, total, precision, *rest):
        precisions.add(precision.name.lower())
        return dot(self, left, right, total, precision, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", noted)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=allowed))
    for queries, keys in ((1, 512), (17, 17)):  # the first is decoding
        tensors = [torch.randn(1, 1, length, 16, requires_grad=True) for length in (queries, keys, keys)]
        out = alibi_attention(*tensors, causal=False, backend="triton")
    out.sum().backward()
    assert precisions == {allowed}


@pytest.mark.parametrize(
    ("slope", "hides_nearest", "causal"),
    first_fast(
        [
            (-1e7, False, False),
            (-100.0, False, True),
            (1e4, True, True),
            (1e7, True, False),
            (3e36, False, False),
            (3e38, False, True),
        ]
    ),
)
def test_extreme_slopes(slope, hides_nearest, causal):
    check_extreme_slopes("triton", slope, causal=causal, hides_nearest=hides_nearest, queries=70, keys=70)


#: The others take the same loops.
FAST = ["scores that exceed negative ones", "one row masks the far key", "bounded", "a large score", "a negative slope"]


@pytest.mark.parametrize(
    "keys", [pytest.param(k, marks=[] if k in FAST else pytest.mark.slow) for k in NEAR_AND_FAR_KEYS]
)
def test_keys_in_reach(skipping_of_few_keys, keys):
    check_within_reach("triton", keys, causal=keys in FAST)


@pytest.mark.slow
def test_keys_in_reach_on_both_sides(skipping_of_few_keys):
    check_within_reach("triton", "bounded", causal=False)
    check_within_reach("triton", "scores that exceed negative ones", causal=False)


@pytest.mark.parametrize("start", first_fast([2**45, 2**20, -(2**45)]))
@pytest.mark.parametrize("merged", [False, True])
def test_queries_far_from_all_keys_have_the_gradients_of_near_ones(merged, start):
    """To move all queries changes no weight, so positions of 2**45 cost no precision. Short rows share tiles."""
    rows, query_length, key_length = (2, 20, 20) if merged else (1, 40, 36)
    lengths = query_length, key_length, key_length
    leaves = [torch.randn(rows, 2, length, 16, requires_grad=True) for length in lengths]
    leaves.append(torch.tensor([0.5, 0.1], requires_grad=True))
    weights = torch.randn(rows, 2, query_length, 16)

    def gradients(start):
        out = alibi_attention(*leaves, query_start=torch.tensor(rows * [start]), causal=start > 0, backend="triton")
        return torch.autograd.grad(out, leaves, weights)

    near = gradients(key_length if start > 0 else -query_length)
    for got, expected in zip(gradients(start), near, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
