"""Few queries over many keys in the Triton kernels: chunks of keys, merged, and what they skip."""

import math

import pytest
import torch

from seqwarm_kernels import alibi_attention
from tests.support.kernels import DEVICES, TRITON_RUNS, check_attention, record_launches
from tests.support.skipping import check_the_promise
from tests.support.tiers import first_fast

pytest.importorskip("triton")
pytestmark = [TRITON_RUNS, pytest.mark.usefixtures("poisoned_memory")]
NAN = float("nan")


def tensors_of(device, queries=1, keys=700, heads=(4, 2), head_dim=16, batch_size=2, tokens_first=False):
    shapes = (heads[0], queries), (heads[1], keys), (heads[1], keys)
    tensors = [torch.randn(batch_size, *shape, head_dim, device=device) for shape in shapes]
    if tokens_first:
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    return tensors


def bound_of(key):
    return key.nan_to_num().norm(dim=-1).amax(-1)


#: Shapes, options of the call, what else.
CASES = [
    ({"queries": 3, "heads": (6, 1)}, {"dropout_p": 0.3}, {"mask", "bound"}),
    ({"keys": 512}, {}, set()),
    ({"head_dim": 20, "tokens_first": True}, {"causal": False, "query_start": 300}, {"bound"}),
    ({"queries": 16, "heads": (6, 1)}, {"window": 300}, {"mask"}),
    ({"queries": 2, "keys": 1100}, {"causal": False, "window": 400}, {"starts", "slopes by row"}),
    ({"keys": 4500, "batch_size": 1}, {}, {"bound"}),
    ({}, {}, {"mask of everything"}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shapes", "options", "more"), first_fast(CASES))
@pytest.mark.parametrize("skip_tolerance", first_fast([2.0**-24, 0.0]))
def test_outputs_and_gradients(shapes, options, more, skip_tolerance, device):
    query, key, value = tensors_of(device, **shapes)
    batch_size, heads = query.shape[:2]
    options = {**options, "skip_tolerance": skip_tolerance}
    if "mask" in more:
        mask = options["key_padding_mask"] = torch.rand(batch_size, key.shape[2], device=device) < 0.7
        key, value = (tensor.masked_fill(~mask[:, None, :, None], NAN) for tensor in (key, value))
    if "mask of everything" in more:
        options["key_padding_mask"] = torch.zeros(batch_size, key.shape[2], dtype=torch.bool, device=device)
    if "bound" in more:
        options["key_norm_bound"] = bound_of(key)
    if "starts" in more:
        options["query_start"] = torch.tensor([-1, 900], device=device)
    slopes = torch.rand((batch_size, heads) if "slopes by row" in more else heads, device=device) / 3

    def attend(tensors, backend):
        return alibi_attention(*tensors, return_lse=True, backend=backend, **options)

    check_attention("triton", attend, [query, key, value, slopes])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slope", first_fast([3e38, -1e7]))
def test_one_key_has_all_the_weight(slope, device):
    """The nearest one or the farthest: outputs are its value, and only it has a gradient."""
    query, key, value = (tensor.requires_grad_() for tensor in tensors_of(device, heads=(1, 1), batch_size=1))
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
    query, key, value = tensors_of(device, heads=(1, 1), batch_size=1, keys=1500)
    slopes, bound = torch.tensor([0.3], device=device), bound_of(key)

    def reaches_out(tensor, index, **options):
        kept = tensor[0, 0, index].clone()
        tensor[0, 0, index] = NAN
        out = alibi_attention(query, key, value, slopes, backend="triton", **options)
        tensor[0, 0, index] = kept
        return bool(out.isnan().any())

    assert reaches_out(key, 1490)
    assert reaches_out(value, 1490)
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
def test_one_start_for_all_rows(device):
    query, key, value = tensors_of(device, keys=512)
    start = torch.tensor(300, device=device)
    expected = alibi_attention(query, key, value, query_start=300, backend="triton")
    assert torch.equal(alibi_attention(query, key, value, query_start=start, backend="triton"), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bounded", [False, True])
def test_a_huge_far_key_is_found(bounded, device):
    query, key, value = tensors_of(device, heads=(2, 2))
    key[:, :, 7] = 1000 * query[:, :, 0]
    bound = bound_of(key) if bounded else None
    out = alibi_attention(query, key, value, key_norm_bound=bound, backend="triton")
    torch.testing.assert_close(out[:, :, 0], value[:, :, 7])


@pytest.mark.parametrize("device", DEVICES)
def test_nan_behind_the_position_and_in_a_query(device):
    query, key, value = tensors_of(device, queries=2)
    want = alibi_attention(query, key[:, :, :602], value[:, :, :602], backend="triton")
    for tensor in (key, value):
        tensor[:, :, 602:] = NAN
    query[1, 2, 0] = NAN
    out = alibi_attention(query, key, value, query_start=600, backend="triton")
    assert out[1, 2, 0].isnan().all()
    assert out.isnan().sum() == out.shape[-1]
    want[1, 2, 0] = NAN
    torch.testing.assert_close(out, want, equal_nan=True)


#: Bytes of an element, head_dim: keys of a tile, and tiles in flight, as many as fit into registers.
TILES = {
    (2, 16): (64, 3),
    (2, 128): (64, 3),
    (2, 129): (32, 3),
    (2, 256): (32, 3),
    (4, 16): (32, 2),
    (4, 32): (32, 2),
    (4, 64): (16, 2),
    (4, 256): (16, 2),
}


@pytest.mark.parametrize(("bytes_per_element", "head_dim"), TILES)
def test_tiles_of_decoding(bytes_per_element, head_dim):
    """Sizes that Triton compiles, with the queries of a head in one tile, and whole tiles in a chunk."""
    from seqwarm_kernels.ops.alibi_attention import triton_decode

    for rows in (1, 16, 17, 32, 33, 1024):
        tiles = triton_decode.decode_tiles(rows, head_dim, bytes_per_element)
        assert tiles.block_m in (16, 32)
        assert (tiles.block_n, tiles.num_stages) == TILES[bytes_per_element, head_dim]
        assert tiles.num_warps == 4
        assert triton_decode.CHUNK % tiles.block_n == 0


def test_a_launch_gets_its_tiles(monkeypatch):
    from seqwarm_kernels.ops.alibi_attention import triton_decode

    launches = record_launches(monkeypatch, triton_decode)
    alibi_attention(*tensors_of("cpu", keys=513), backend="triton")
    tiles = triton_decode.decode_tiles(2, 16, 4)
    found = [launches["decode_kernel"][name] for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")]
    assert found == list(tiles)


@pytest.mark.parametrize(("causal", "parts"), [(True, 2), (False, 4)])
def test_half_of_the_tolerance_is_for_keys_and_half_for_values(monkeypatch, causal, parts):
    """On each side."""
    from seqwarm_kernels.ops.alibi_attention import triton_decode

    launches = record_launches(monkeypatch, triton_decode)
    alibi_attention(*tensors_of("cpu", keys=514), causal=causal, skip_tolerance=2**-10, backend="triton")
    assert launches["decode_kernel"]["log2_tolerance"] == math.log2(2**-10 / parts)


def test_which_calls_decode():
    from seqwarm_kernels.ops.alibi_attention import triton_decode
    from seqwarm_kernels.ops.alibi_attention.schema import DenseOptions, VarlenOptions

    def of(queries, keys, options=DenseOptions):
        options = options(*[None] * (11 if options is DenseOptions else 10))
        return triton_decode.decodes(torch.empty(1, 1, queries, 8), torch.empty(1, 1, keys, 8), options)

    assert of(1, 512)
    assert of(16, 512)
    assert not of(17, 512)
    assert not of(1, 511)
    assert not of(1, 512, VarlenOptions)


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
