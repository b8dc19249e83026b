"""Short rows and segments, which share tiles in the Triton kernels."""

import pytest
import torch

from seqwarm_kernels import alibi_attention
from seqwarm_kernels.ops.alibi_attention.triton_configurations import longer_tile, short_tile
from seqwarm_kernels.self_check.calls import RESULTS, differentiate
from tests.support.attention_cases import draw_tensor
from tests.support.kernels import DEVICES, TRITON_RUNS, check_attention
from tests.support.tiers import first_fast

pytest.importorskip("triton")
pytestmark = [TRITON_RUNS, pytest.mark.usefixtures("poisoned_memory")]
LAYOUTS = ("heads first", "tokens first", "strided")


@pytest.fixture(autouse=True)
def tiles_of_64_tokens(monkeypatch):
    """In the interpreter, which has no 16-bit products, float32 takes the tiles of 16-bit tensors."""
    if not torch.cuda.is_available():
        from seqwarm_kernels.ops.alibi_attention import triton_short

        monkeypatch.setattr(triton_short, "short_tile", lambda chip, head_dim, _: short_tile(chip, head_dim, 2))
        monkeypatch.setattr(triton_short, "longer_tile", lambda chip, head_dim, _: longer_tile(chip, head_dim, 2))


def dtype_of(device, tokens):
    return torch.bfloat16 if device == "cuda" and tokens > 32 else torch.float32


def shares_tiles(tensors, longer=False, **options):
    from seqwarm_kernels.ops.alibi_attention.schema import DenseOptions
    from seqwarm_kernels.ops.alibi_attention.triton_short import is_short

    query, key, _, slopes = tensors
    seed = torch.zeros((), dtype=torch.int64) if options.get("dropout_p") else None
    segment_length = options.get("segment_length")
    described = DenseOptions(None, None, seed, 0, True, 1, segment_length, None, 0, 0)
    return is_short(query, key, slopes, described, longer=longer)


#: Rows, tokens, layout, options. Rows with the same remainder by 4 and with another, in one tile and in several.
CASES = [
    (7, 12, "heads first", {"mask": True, "own positions": True, "dropout_p": 0.3}),
    (300, 1, "tokens first", {}),
    (70, 3, "heads first", {"causal": False}),
    (19, 7, "strided", {"mask": True}),
    (9, 16, "tokens first", {"window": 3}),
    (5, 33, "heads first", {"own positions": True}),
    (9, 16, "strided", {"segment_length": 4}),
    (3, 40, "tokens first", {"dropout_p": 0.3, "causal": False}),
    (3, 64, "heads first", {"segment_length": 100, "causal": False, "window": 20}),
    (2, 120, "tokens first", {"segment_length": 12, "dropout_p": 0.3, "mask": True}),
    (1, 150, "strided", {"segment_length": 50, "causal": False}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("batch_size", "length", "layout", "options"), first_fast(CASES))
def test_rows_that_share_tiles(batch_size, length, layout, options, device):
    of_value = "tokens first" if layout == "heads first" else "heads first"
    layouts_and_heads = zip((layout, layout, of_value), (4, 2, 2), strict=True)
    dtype = dtype_of(device, min(length, options.get("segment_length", length)))
    like = {"device": device, "dtype": dtype}
    tensors = [draw_tensor(each, batch_size, heads, length, 20, **like) for each, heads in layouts_and_heads]
    leaves = [*tensors, torch.rand(4, device=device) - 0.2]
    assert shares_tiles(leaves, **options)
    check_results(leaves, options)


#: Of these, backward alone has a tile for a whole row.
LONGER_ROWS = [
    (2, 128, "heads first", {}),
    (3, 65, "tokens first", {"causal": False, "mask": True, "own positions": True}),
    (2, 100, "strided", {"dropout_p": 0.3, "window": 20}),
    (1, 240, "heads first", {"segment_length": 80, "causal": False}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("batch_size", "length", "layout", "options"), first_fast(LONGER_ROWS))
def test_backward_of_longer_rows(batch_size, length, layout, options, device):
    like = {"device": device, "dtype": dtype_of(device, length)}
    leaves = [draw_tensor(layout, batch_size, 2, length, 40, **like) for _ in range(3)]
    leaves.append(torch.rand(2, device=device) - 0.2)
    assert shares_tiles(leaves, longer=True, **options) or torch.cuda.is_available()
    assert not shares_tiles(leaves, **options)
    check_results(leaves, options)


def check_results(leaves, options):
    query = leaves[0]
    batch_size, _, length, _ = query.shape
    device = query.device
    options = dict(options)
    if options.pop("mask", False):
        options["key_padding_mask"] = torch.rand(batch_size, 2 * length, device=device)[:, ::2] < 0.7
    if options.pop("own positions", False):
        options["query_start"] = torch.randint(-3, length + 3, (batch_size,), device=device)

    def attend(tensors, backend):
        return alibi_attention(*tensors, return_lse=True, skip_tolerance=0, backend=backend, **options)

    check_attention("triton", attend, leaves)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("layout", "length"), first_fast([("tokens first", 8), ("heads first", 3), ("strided", 40)]))
def test_nan_stays_in_its_row(layout, length, device):
    batch_size, poisoned, others = 5, 2, [0, 1, 3, 4]
    like = {"device": device, "dtype": dtype_of(device, length)}
    tensors = [draw_tensor(layout, batch_size, heads, length, 16, **like) for heads in (2, 1, 1)]
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


@pytest.mark.parametrize("device", DEVICES)
def test_an_infinite_key_without_weight_reaches_its_queries(device):
    """Its score is −∞, so outputs are finite. Its product with a gradient of 0 is NaN."""
    query, key, value = (torch.rand(3, 1, 8, 16, device=device) for _ in range(3))
    key[1, 0, 2, 0] = float("-inf")
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = alibi_attention(*leaves, backend="triton")
    of_query, of_key, of_value = torch.autograd.grad(out.sum(), leaves)
    assert out.isfinite().all()
    sees = torch.zeros(3, 8, dtype=torch.bool, device=device)
    sees[1, 2:] = True
    assert torch.equal(of_query[:, 0].isnan().all(-1), sees)
    assert of_query[:, 0][~sees].isfinite().all()
    assert all(gradient[[0, 2]].isfinite().all() for gradient in (of_key, of_value))


@pytest.mark.parametrize("device", DEVICES)
def test_an_infinite_query_without_weights_reaches_no_gradient(device):
    """All of its scores are −∞, so it attends nothing."""
    query, key, value = (torch.rand(2, 1, 8, 16, device=device) for _ in range(3))
    query[0, 0, 3, 0] = float("-inf")
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = alibi_attention(*leaves, backend="triton")
    _, of_key, of_value = torch.autograd.grad(out.sum(), leaves)
    assert out[0, 0, 3].eq(0).all()
    assert of_key.isfinite().all()
    assert of_value.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_ranges_of_segments(device):
    query = torch.randn(2, 1, 96, 16, device=device)
    slopes = torch.ones(1, device=device)
    options = (None, None, None, 0, True, 1.0, 12, None, 0.0, 0.0, None)
    ranges = torch.ops.seqwarm.alibi_attention.triton(query, query, query, slopes, *options)[3]
    assert ranges.view(2, 3, 2).tolist() == 2 * [[[0, 36], [24, 72], [60, 96]]]


def test_which_rows_share_tiles(monkeypatch):
    monkeypatch.undo()

    def of(batch_size, length, key_length=None, slopes=None, dtype=torch.bfloat16, heads=2, head_dim=64, **options):
        query = torch.empty(batch_size, heads, length, head_dim, dtype=dtype)
        key = torch.empty(batch_size, 2, key_length or length, head_dim, dtype=dtype)
        return shares_tiles((query, key, key, torch.ones(2) if slopes is None else slopes), **options)

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
    assert not of(2, 0, segment_length=4)
    assert not of(2, 1, key_length=9)
    assert not of(2, 8, slopes=torch.ones(2, 2))
    assert not of(2, 6, segment_length=4)  # the last segment of a row is shorter
    assert not of(2, 6, dropout_p=0.1)  # four keys share random numbers
