"""Short rows and segments, which share tiles in the Triton kernels."""

import pytest
import torch

from seqwarm_kernels import alibi_attention
from seqwarm_kernels.ops.alibi_attention.schema import DenseOptions
from seqwarm_kernels.self_check.calls import RESULTS, differentiate
from tests.support.attention_cases import LAYOUTS
from tests.support.kernels import DEVICES, TRITON_RUNS
from tests.support.tiers import first_fast

pytest.importorskip("triton")
pytestmark = [TRITON_RUNS, pytest.mark.usefixtures("poisoned_memory", "tiles_of_16_bits")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("layout", "length"), first_fast([("projection", 8), ("contiguous", 3), ("slice", 40)]))
def test_nan_stays_in_its_row(layout, length, device):
    batch_size, poisoned, others = 5, 2, [0, 1, 3, 4]
    like = {"device": device, "dtype": torch.bfloat16 if device == "cuda" and length > 32 else torch.float32}
    tensors = [LAYOUTS[layout](torch.randn(batch_size, heads, length, 16, **like)) for heads in (2, 1, 1)]
    grad_out = torch.randn(tensors[0].shape, **like)
    weights = grad_out, torch.randn(tensors[0].shape[:-1], device=device)

    def results():
        def attend(leaves):
            return alibi_attention(*leaves, return_lse=True, backend="triton")

        return differentiate(attend, [tensor.detach().requires_grad_() for tensor in tensors], weights)

    want = results()
    reached = {"query": "out", "key": "out", "value": "out", "grad_out": "grad_value"}
    for (name, result), tensor in zip(reached.items(), (*tensors, grad_out), strict=True):
        clean = tensor[poisoned].clone()
        tensor[poisoned, 0, length - 1, 1] = float("nan")
        got = results()
        tensor[poisoned] = clean
        for what in (result, "grad_query", "grad_key"):
            assert got[RESULTS.index(what)][poisoned, 0, length - 1].isnan().all(), f"NaN in {name} missed {what}"
        for what, first, second in zip(RESULTS, got, want, strict=False):
            assert torch.equal(first[others], second[others]), f"NaN in {name} reached {what} of other rows"
    assert want[0].isfinite().all()


def gradients_of_infinity(place, device):
    """out, gradients of query, key and value. The query, key or value of this place holds −∞."""
    leaves = [torch.rand(3, 1, 8, 16, device=device) for _ in range(3)]
    leaves[place][1, 0, 2, 0] = float("-inf")
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = alibi_attention(*leaves, backend="triton")
    return out, *torch.autograd.grad(out.sum(), leaves)


@pytest.mark.parametrize("device", DEVICES)
def test_an_infinite_key_without_weight_reaches_its_queries(device):
    """Its score is −∞, so outputs are finite. Its product with a gradient of 0 is NaN."""
    out, of_query, of_key, of_value = gradients_of_infinity(1, device)
    assert out.isfinite().all()
    sees = torch.zeros(3, 8, dtype=torch.bool, device=device)
    sees[1, 2:] = True
    assert torch.equal(of_query[:, 0].isnan().all(-1), sees)
    assert of_query[:, 0][~sees].isfinite().all()
    assert all(gradient[[0, 2]].isfinite().all() for gradient in (of_key, of_value))


@pytest.mark.parametrize("device", DEVICES)
def test_an_infinite_query_without_weights_reaches_no_gradient(device):
    """All of its scores are −∞, so it attends nothing."""
    out, _, of_key, of_value = gradients_of_infinity(0, device)
    assert out[1, 0, 2].eq(0).all()
    assert of_key.isfinite().all()
    assert of_value.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_ranges_of_segments(device):
    query = torch.randn(2, 1, 96, 16, device=device)
    slopes = torch.ones(1, device=device)
    options = (None, None, None, 0, True, 1.0, 12, None, 0.0, 0.0, None)
    ranges = torch.ops.seqwarm.alibi_attention.triton(query, query, query, slopes, *options)[3]
    assert ranges.view(2, 3, 2).tolist() == 2 * [[[0, 36], [24, 72], [60, 96]]]


PLAIN = DenseOptions(None, None, None, 0, True, 1, None, None, 0, 0)


def test_which_rows_share_tiles(monkeypatch):
    from seqwarm_kernels.ops.alibi_attention.triton_short import is_short

    monkeypatch.undo()

    def of(batch_size, length, key_length=None, slopes=1, dtype=torch.bfloat16, heads=2, head_dim=64, **options):
        longer = options.pop("longer", False)
        query = torch.empty(1, heads, length, head_dim, dtype=dtype).expand(batch_size, -1, -1, -1)
        key = torch.empty(1, 2, key_length or length, head_dim, dtype=dtype).expand(batch_size, -1, -1, -1)
        return is_short(query, key, torch.ones(slopes * [2]), PLAIN._replace(**options), longer=longer)

    assert of(2, 64)
    assert of(2, 6, segment_length=3)
    assert of(2, 6, segment_length=7)
    assert of(1, 128, segment_length=64)
    assert of(2, 32, dtype=torch.float32)
    assert not of(2, 33, dtype=torch.float32)
    assert not of(2, 65)
    assert of(2, 65, longer=True)
    assert of(2, 128, longer=True)
    assert not of(2, 129, longer=True)
    assert not of(2, 128, longer=True, dtype=torch.float32)
    assert not of(2, 128, longer=True, head_dim=128)
    assert not of(2, 128, longer=True, heads=4)
    assert not of(1, 64)
    assert of(2**26, 8)
    assert not of(2**26 + 1, 8)
    assert not of(2, 0, segment_length=4)
    assert not of(2, 1, key_length=9)
    assert not of(2, 8, slopes=2)
    assert not of(2, 6, segment_length=4)  # the last segment of a row is shorter
    assert not of(2, 6, dropout_seed=torch.tensor(0))  # four keys share random numbers
