"""Attention to DTensors has the outputs and gradients of one device, to the bit where the sums are the same."""

import contextlib
import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import seqwarm_kernels as sw
from seqwarm_kernels.ops import backends, call_key

from ..support.ranks import run_on_mesh

ROWS, HEADS, KEY_HEADS, LENGTH, WIDTH = 4, 8, 4, 37, 8
STARTS = (0, 10, 10, 37)
BY_ROWS, BY_HEADS, WHOLE = Shard(0), Shard(1), Replicate()
SLOPES = sw.alibi_slopes(HEADS)
BY_ROW = SLOPES * torch.tensor([[1.0], [0.5], [2.0], [0.0]])  #: slopes of each row
SERVING = [
    name for name in ("reference", "native") if backends.why_not("alibi_attention", name, "cpu", torch.float32) is None
]


def inputs(is_packed):
    torch.manual_seed(0)
    if is_packed:
        return [torch.randn(LENGTH, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    return [torch.randn(ROWS, heads, LENGTH, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]


def attend(tensors, slopes, is_packed, **options):
    if not is_packed:
        return sw.alibi_attention(*tensors, slopes, return_lse=True, **options)
    ends = torch.tensor(STARTS, dtype=torch.int32)
    options = {name: value for name, value in options.items() if name not in ("key_padding_mask", "query_start")}
    options["query_start"] = options.pop("starts", None)
    return sw.alibi_attention_varlen(*tensors, ends, ends, 27, 27, slopes, return_lse=True, **options)


def dense_options(kind):
    """Positions of each row, or one for all; with a mask, or with bounds of the key norms."""
    mask = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 5 > 0
    if kind == "rows":
        return {"query_start": torch.tensor([0, 3, -2, 90]), "key_padding_mask": mask}
    if kind == "one":
        return {"query_start": torch.tensor(4), "key_norm_bound": torch.full((ROWS, KEY_HEADS), 99.0), "causal": False}
    return {"segment_length": 16}


def gradients(outputs, gradient, slopes, tensors):
    """of the slopes last. The lse takes part, weighted by its own index."""
    out, lse = outputs
    weights = torch.arange(lse.numel()).view(lse.shape).sin()
    if hasattr(out, "placements"):
        gradient = distribute_tensor(gradient, out.device_mesh, out.placements, src_data_rank=None)
        weights = distribute_tensor(weights, lse.device_mesh, lse.placements, src_data_rank=None)
    wanted = [*tensors, slopes] if slopes.requires_grad else tensors
    return torch.autograd.grad([out, lse], wanted, [gradient, weights])


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check(mesh, placements, slopes, options, is_packed=False, own=attend):
    """One call on DTensors against the same call on plain tensors. Returns the gradient of the slopes as it came."""
    *tensors, gradient = inputs(is_packed)
    tensors = [tensor.requires_grad_() for tensor in tensors]
    plain = whole(slopes.detach()).requires_grad_(slopes.requires_grad)
    expected = attend(tensors, plain, is_packed, **options)
    sharded = [distribute_tensor(tensor.detach(), mesh, placements).requires_grad_() for tensor in tensors]
    with CommDebugMode() if own is attend else contextlib.nullcontext() as communication:
        outputs = own(sharded, slopes, is_packed, **options)
        found = gradients(outputs, gradient, slopes, sharded)
    if communication is not None and not slopes.requires_grad and not options.get("dropout_p"):
        assert communication.get_total_counts() == 0
    wanted = gradients(expected, gradient, plain, tensors)
    assert all(torch.equal(whole(one), other) for one, other in zip(outputs, expected, strict=True))
    assert all(torch.equal(whole(one), other) for one, other in zip(found[:3], wanted[:3], strict=True))
    assert all(one.placements == tuple(placements) for one in found[:3])
    if not slopes.requires_grad:
        return None
    torch.testing.assert_close(whole(found[3]), wanted[3], rtol=1e-5, atol=1e-5)
    if BY_ROWS not in placements:
        assert torch.equal(whole(found[3]), wanted[3])
    return found[3]


def check_grid(mesh):
    for backend, placement, kind in itertools.product(SERVING, (BY_ROWS, BY_HEADS, WHOLE), ("rows", "one", "segments")):
        options = dense_options(kind) | {"backend": backend}
        check(mesh, [placement], SLOPES, options)
        check(mesh, [placement], BY_ROW.clone().requires_grad_(), options)
    for backend, placement in itertools.product(SERVING, (BY_HEADS, WHOLE)):
        for given in (SLOPES, SLOPES[None] * torch.tensor([[1.0], [0.5], [2.0]])):
            check(mesh, [placement], given, {"backend": backend}, is_packed=True)
            options = {"backend": backend, "starts": torch.tensor([0, 9, -3])}
            check(mesh, [placement], given.clone().requires_grad_(), options, is_packed=True)


def check_packed(mesh):
    options = {"starts": torch.tensor([0, 9, -3])}
    check(mesh, [BY_HEADS], SLOPES.clone().requires_grad_(), options, is_packed=True)


def check_kind_of_call(mesh):
    """A known call would take the local tensors for all."""
    for kind_of in (call_key._call_key, call_key.call_key):
        assert kind_of(SLOPES) is not None
        assert kind_of(distribute_tensor(SLOPES, mesh, [WHOLE])) is None


def check_slopes(mesh):
    """Gradients of SLOPES are placed as the SLOPES. Where rows are sharded, those of shared SLOPES are summands."""
    cases = [
        (SLOPES, BY_HEADS, Shard(0), Shard(0)),
        (SLOPES, BY_HEADS, WHOLE, WHOLE),
        (SLOPES, BY_ROWS, WHOLE, Partial("sum")),
        (BY_ROW, BY_HEADS, Shard(1), Shard(1)),
        (BY_ROW, BY_ROWS, Shard(0), Shard(0)),
    ]
    for given, placement, own, expected in cases:
        learned = distribute_tensor(given, mesh, [own]).requires_grad_()
        gradient = check(mesh, [placement], learned, {})
        assert gradient.placements == (expected,), (placement, own, gradient.placements)
    plain = check(mesh, [BY_ROWS], SLOPES.clone().requires_grad_(), {})
    assert type(plain) is torch.Tensor


def check_default_slopes(mesh):
    """Those of all heads. The slopes of the local heads would be others."""
    *tensors, _ = inputs(False)
    expected = sw.alibi_attention(*tensors)
    sharded = [distribute_tensor(tensor, mesh, [BY_HEADS]) for tensor in tensors]
    assert torch.equal(sw.alibi_attention(*sharded).full_tensor(), expected)
    local = sw.alibi_attention(*(tensor.to_local() for tensor in sharded))
    assert not torch.equal(local, sw.alibi_attention(*sharded).to_local())


def check_uneven_rows(mesh):
    *tensors, _ = [tensor[:3] for tensor in inputs(False)]
    mask = dense_options("rows")["key_padding_mask"][:3]
    expected = sw.alibi_attention(*tensors, key_padding_mask=mask)
    sharded = [distribute_tensor(tensor, mesh, [BY_ROWS]) for tensor in tensors]
    out = sw.alibi_attention(*sharded, key_padding_mask=mask)
    assert torch.equal(out.full_tensor(), expected)


def check_compiled(mesh):
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    check(mesh, [BY_HEADS], SLOPES, dense_options("rows"), own=compiled)
    check(mesh, [BY_ROWS], SLOPES.clone().requires_grad_(), {}, own=compiled)
    learned = distribute_tensor(SLOPES, mesh, [WHOLE]).requires_grad_()
    check(mesh, [BY_HEADS], learned, {}, own=compiled)


def check_dropout(mesh):
    """The masks are those of one device, although each rank would draw another seed."""
    for placement, backend in itertools.product((BY_HEADS, BY_ROWS, WHOLE), SERVING):
        for is_packed in (False,) if placement == BY_ROWS else (False, True):
            *tensors, _ = inputs(is_packed)
            sharded = [distribute_tensor(tensor, mesh, [placement]) for tensor in tensors]
            torch.manual_seed(mesh.get_rank())
            seeds = [_seed_after(rank) for rank in range(2)]
            out, _ = attend(sharded, SLOPES, is_packed, dropout_p=0.3, backend=backend)
            torch.manual_seed(max(range(2), key=seeds.__getitem__))
            expected, _ = attend(tensors, SLOPES, is_packed, dropout_p=0.3, backend=backend)
            assert torch.equal(out.full_tensor(), expected), (placement, backend, is_packed)


def _seed_after(seed):
    """The dropout seed that a rank draws first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.randint(2**63 - 1, ()).item()


def check_share(mesh):
    *tensors, _ = inputs(False)
    sharded = [distribute_tensor(tensor, mesh, [BY_HEADS]) for tensor in tensors]
    share = sw.attended_share(*sharded)
    assert share.placements == (BY_HEADS,)
    assert torch.equal(share.full_tensor(), sw.attended_share(*tensors))


def check_refused(mesh):
    tensors = inputs(False)[:3]
    query, key, value = tensors

    def on(tensors, *placements):
        return [distribute_tensor(tensor, mesh, placements) for tensor in tensors]

    by_heads, by_rows = on(tensors, BY_HEADS), on(tensors, BY_ROWS)
    [replicated_key, replicated_slopes] = on([key, SLOPES], WHOLE)
    refused = [
        (ValueError, "query", on(tensors, Shard(2))),
        (ValueError, "query", on(tensors, Shard(3))),
        (ValueError, "key", [by_heads[0], replicated_key, by_heads[2]]),
        (TypeError, "value", [*by_heads[:2], value]),
        (TypeError, "query", [query, key, value, replicated_slopes]),
        (ValueError, "slopes", [*by_rows, *on([SLOPES], Shard(0))]),
        (ValueError, "slopes", [*by_heads, SLOPES[:4]]),
        (ValueError, "query", on([query[:, :6], key[:, :3], value[:, :3]], BY_HEADS)),
        (ValueError, "query", on([tensor[:1] for tensor in tensors], BY_ROWS)),
    ]
    for error, name, arguments in refused:
        with pytest.raises(error, match=f"^{name}"):
            sw.alibi_attention(*arguments)
    with pytest.raises(ValueError, match=r"^query"):
        attend(on(inputs(True)[:3], Shard(0)), SLOPES, True)


def check_rows_and_heads(mesh):
    """A mesh of two dimensions: rows over one, heads over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placements in ([BY_ROWS, BY_HEADS], [BY_HEADS, BY_HEADS], [BY_ROWS, BY_ROWS], [WHOLE, BY_HEADS]):
        for learned in (False, True):
            check(mesh, placements, SLOPES.clone().requires_grad_(learned), dense_options("rows"))
    learned = distribute_tensor(SLOPES, mesh, [WHOLE, Shard(0)]).requires_grad_()
    assert check(mesh, [BY_ROWS, BY_HEADS], learned, {}).placements == (Partial("sum"), Shard(0))
    *tensors, _ = inputs(False)
    sharded = [distribute_tensor(tensor, mesh, [BY_ROWS, BY_HEADS]) for tensor in tensors]
    torch.manual_seed(0)
    out = sw.alibi_attention(*sharded, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(out.full_tensor(), sw.alibi_attention(*tensors, dropout_p=0.5))


@pytest.mark.parametrize(
    "each",
    [
        check_slopes,
        check_packed,
        check_kind_of_call,
        check_default_slopes,
        check_uneven_rows,
        check_share,
        check_refused,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (check_grid, check_compiled, check_dropout)),
    ],
)
def test_two_ranks(each):
    run_on_mesh(each)


@pytest.mark.slow
def test_four_ranks():
    run_on_mesh(check_rows_and_heads, world_size=4)
