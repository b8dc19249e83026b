"""Few queries over many keys in the Triton kernels: chunks of keys, merged, and what they skip."""

import pytest
import torch

from seqwarm_kernels import alibi_attention
from tests.support.kernels import DEVICES, TRITON_RUNS
from tests.support.skipping import check_the_promise
from tests.support.tiers import first_fast

pytest.importorskip("triton")
pytestmark = [TRITON_RUNS, pytest.mark.usefixtures("poisoned_memory")]
NAN = float("nan")


def tensors_of(device, queries=1, keys=520, heads=(1, 1), batch_size=1):
    shapes = (heads[0], queries), (heads[1], keys), (heads[1], keys)
    return [torch.randn(batch_size, *shape, 16, device=device) for shape in shapes]


def bound_of(key):
    return key.nan_to_num().norm(dim=-1).amax(-1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slope", first_fast([3e38, -1e7]))
def test_one_key_has_all_the_weight(slope, device):
    """The nearest one or the farthest: outputs are its value, and only it has a gradient."""
    query, key, value = (tensor.requires_grad_() for tensor in tensors_of(device, keys=700))
    out = alibi_attention(query, key, value, torch.full((1,), slope, device=device), backend="triton")
    of_query, _, of_value = torch.autograd.grad(out.sum(), (query, key, value))
    chosen = -1 if slope > 0 else 0
    assert torch.equal(out[0, 0, 0], value[0, 0, chosen])
    assert of_query.abs().max() < 1e-6  # terms of the size of 1 cancel
    expected = torch.zeros_like(value)
    expected[0, 0, chosen] = 1
    assert torch.equal(of_value, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_read(device):
    query, key, value = tensors_of(device, keys=600)
    slopes, bound = torch.tensor([0.3], device=device), bound_of(key)

    def reaches_out(tensor, index, **options):
        kept = tensor[0, 0, index].clone()
        tensor[0, 0, index] = NAN
        out = alibi_attention(query, key, value, slopes, backend="triton", **options)
        tensor[0, 0, index] = kept
        return bool(out.isnan().any())

    assert reaches_out(key, 590)
    assert reaches_out(value, 590)
    assert reaches_out(key, 100)
    assert not reaches_out(value, 100)
    assert reaches_out(value, 100, skip_tolerance=0)
    assert not reaches_out(key, 100, key_norm_bound=bound)
    assert reaches_out(key, 100, key_norm_bound=bound, skip_tolerance=0)
    assert reaches_out(key, 100, key_norm_bound=bound * NAN)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("causal", "bounded"), first_fast([(False, True), (False, False), (True, True), (True, False)])
)
def test_the_worst_keys_weigh_no_more_than_the_tolerance(causal, bounded, device):
    check_the_promise("triton", causal=causal, bounded=bounded, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bounded", [False, True])
def test_a_huge_far_key_is_found(bounded, device):
    query, key, value = tensors_of(device)
    key[:, :, 7] = 1000 * query[:, :, 0]
    bound = bound_of(key) if bounded else None
    out = alibi_attention(query, key, value, key_norm_bound=bound, backend="triton")
    torch.testing.assert_close(out[:, :, 0], value[:, :, 7])


@pytest.mark.parametrize("device", DEVICES)
def test_nan_in_a_query_stays_in_its_row(device):
    query, key, value = tensors_of(device, queries=2, heads=(4, 2))
    query[0, 2, 0] = NAN
    out = alibi_attention(query, key, value, backend="triton")
    assert out[0, 2, 0].isnan().all()
    assert out.isnan().sum() == out.shape[-1]


@pytest.mark.parametrize("device", DEVICES)
def test_keys_in_reach_of_large_scores(device):
    """All keys score 25, and the slope is flat: none is out of reach."""
    query, key = torch.full((1, 1, 1, 16), 2.5, device=device), torch.full((1, 1, 900, 16), 2.5, device=device)
    value, slopes = torch.randn(1, 1, 900, 16, device=device), torch.tensor([0.01], device=device)
    bound = key.norm(dim=-1).amax(-1)
    out, exact = (
        alibi_attention(query, key, value, slopes, key_norm_bound=bound, backend=backend)
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)
