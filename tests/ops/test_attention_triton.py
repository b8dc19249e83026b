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
    first_fast([(-1e7, False, False), (-100.0, False, True), (1e7, True, False), (3e38, False, True)]),
)
def test_extreme_slopes(slope, hides_nearest, causal):
    check_extreme_slopes("triton", slope, causal=causal, hides_nearest=hides_nearest, queries=50, keys=50)


@pytest.mark.parametrize("keys", NEAR_AND_FAR_KEYS)
def test_keys_in_reach(skipping_of_few_keys, keys):
    check_within_reach("triton", keys)


@pytest.mark.slow
def test_keys_in_reach_on_both_sides(skipping_of_few_keys):
    check_within_reach("triton", "bounded", causal=False)
    check_within_reach("triton", "scores that exceed negative ones", causal=False)
