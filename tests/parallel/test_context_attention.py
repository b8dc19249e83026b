"""Attention to sharded tokens computes what one device computes, and sends no more than it must."""

import importlib
import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch._dynamo.testing
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

from seqwarm_kernels import alibi_attention, alibi_attention_varlen
from seqwarm_kernels.parallel import (
    context_attention,
    context_attention_varlen,
    halo_widths,
    heads_to_tokens,
    local_heads,
    tokens_to_heads,
)

from ..support.ranks import run_on_mesh
from ..support.tiers import first_fast

module = importlib.import_module("seqwarm_kernels.parallel.context_attention")  # the function has the same name

HEADS, KEY_HEADS, HEAD_DIM, BATCH_SIZE = 4, 2, 8, 2
SLOPES = torch.tensor([0.9, 0.6, 0.4, 0.25])
#: Neither hides a difference in float64, where eager itself is good to 1e-13.
EXACT = {torch.float64: 2**-50, torch.float32: 2**-24}
BOUND = {torch.float64: 1e-11, torch.float32: 1e-5}
BACKEND = {torch.float64: "reference", torch.float32: None}

#: (tokens of a rank, options). Halos are smaller than a shard of 200, equal to one of 24, and larger.
CASES = [
    (200, {}),
    (24, {}),
    (36, {"skip_tolerance": 0.0}),
    (50, {"window": 7}),
    (13, {"window": 20}),
    (24, {"segment_length": 24}),  # nothing travels
    (30, {"segment_length": 24}),
    (26, {"segment_length": 80}),
    (48, {"dropout_p": 0.3}),
    (20, {"dropout_p": 0.3, "segment_length": 12}),
]


def inputs(size, length, dtype, seed=0):
    """Of all ranks: query, key, value, slopes, and the gradients of out and lse."""
    torch.manual_seed(seed)
    query, key, value, grad_out = (
        torch.randn(BATCH_SIZE, heads, size * length, HEAD_DIM, dtype=dtype)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    return (query, key, value, SLOPES.to(dtype)), (grad_out, torch.randn(grad_out.shape[:-1], dtype=dtype))


def own(tensor, mesh, length, dim=2):
    return tensor.narrow(dim, mesh.get_local_rank() * length, length)


def differentiate(function, tensors, gradients):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    outputs = function(*leaves)
    torch.autograd.backward(outputs, gradients)
    return [*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves)]


def compare(mesh, whole, attend, tensors, gradients, length, bound, valid=None):
    """Outputs, lse and gradients of this rank with those of one device. `valid` (B, S): rows to compare."""
    set_largest_seed(mesh)
    expected = differentiate(whole, tensors, gradients)
    shards = [own(tensor, mesh, length) for tensor in tensors[:3]]
    own_gradients = [own(gradient, mesh, length) for gradient in gradients]
    torch.manual_seed(mesh.get_local_rank())
    found = differentiate(attend, [*shards, tensors[3]], own_gradients)
    assert found[0].isfinite().all()
    torch.distributed.all_reduce(found[-1])
    for index, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
        if index < len(found) - 1:
            wanted = own(wanted, mesh, length)
        if index < 2 and valid is not None:
            rows = own(valid, mesh, length, 1)[:, None].expand(actual.shape[:3])
            actual, wanted = actual[rows], wanted[rows]
        scale = wanted[wanted.isfinite()].abs().max().clamp(min=1) if wanted.numel() else 1
        is_long_sum = index == len(found) - 1 and wanted.dtype == torch.float32  # the slopes', with cancellation
        torch.testing.assert_close(actual, wanted, rtol=0, atol=float(bound * scale * (100 if is_long_sum else 1)))


def set_largest_seed(mesh):
    """For dropout on one device: draws the largest of the seeds that the ranks draw."""
    drawn = [torch.randint(2**63 - 1, (), generator=torch.manual_seed(rank)) for rank in range(mesh.size())]
    torch.manual_seed(drawn.index(max(drawn)))


def attend_by_heads(query, key, value, slopes, mesh, **options):
    """All tokens of some heads on each rank, by an exchange before and after."""
    query, key, value = (tokens_to_heads(tensor, mesh) for tensor in (query, key, value))
    out, lse = alibi_attention(query, key, value, local_heads(slopes, mesh), **options)
    return heads_to_tokens(out, mesh), heads_to_tokens(lse[..., None], mesh)[..., 0]


#: (case, dtype, causal)
GRID = list(itertools.product(CASES, EXACT, (True, False)))
#: Causal in turns: a halo, windows, segments that a rank cuts and does not cut, dropout.
FAST = [(CASES[index], torch.float64, index % 2 == 0) for index in (0, 3, 5, 6, 8, 9)]
FAST.append((CASES[1], torch.float32, False))


def one_device_is_met(mesh, grid):
    """By halos that travel to the next ranks, and by heads."""
    for (length, options), dtype, causal in grid:
        tensors, gradients = inputs(mesh.size(), length, dtype)
        options = {"skip_tolerance": EXACT[dtype], "causal": causal, "return_lse": True, **options}
        options["backend"] = "reference" if "dropout_p" in options else BACKEND[dtype]
        whole = partial(alibi_attention, **options | {"skip_tolerance": 0.0})
        ways = [context_attention]
        if "dropout_p" not in options and KEY_HEADS % mesh.size() == 0:
            ways.append(attend_by_heads)
        for way in ways:
            compare(mesh, whole, partial(way, mesh=mesh, **options), tensors, gradients, length, BOUND[dtype])


def masks_hide_keys(mesh):
    """Also all keys of a rank, and those that a row's own position is among. Masked keys hold NaN."""
    length = 40
    for causal in (True, False):
        (query, key, value, slopes), gradients = inputs(mesh.size(), length, torch.float64)
        mask = torch.rand(BATCH_SIZE, mesh.size() * length) > 0.3
        mask[0, -length:] = False
        mask[1, :length] = False
        key[~mask[:, None].expand(key.shape[:3])] = float("nan")
        gradients = [
            gradient * mask[:, None].reshape(BATCH_SIZE, 1, -1, *[1] * (gradient.dim() - 3)) for gradient in gradients
        ]
        options = {"causal": causal, "return_lse": True, "backend": "reference"}
        whole = partial(alibi_attention, key_padding_mask=mask, skip_tolerance=0.0, **options)
        options |= {"key_padding_mask": own(mask, mesh, length, 1), "skip_tolerance": 2**-50, "mesh": mesh}
        attend = partial(context_attention, **options)
        compare(mesh, whole, attend, (query, key, value, slopes), gradients, length, 1e-11, valid=mask)


def of_packed(function, *boundaries, **options):
    """The function of packed sequences as one of (1, heads, tokens, width)."""

    def attend(query, key, value, slopes):
        tensors = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        out, lse = function(*tensors, *boundaries, slopes, return_lse=True, backend="reference", **options)
        return out.transpose(0, 1)[None], lse[None]

    return attend


def packed_sequences_meet_one_device(mesh):
    length = 52
    total = mesh.size() * length
    cu_seqlens = torch.tensor([0, 20, 20, 75, 80, total - 5], dtype=torch.int32)  # tokens without a sequence last
    longest = max(55, total - 85)
    tensors, (grad_out, grad_lse) = inputs(mesh.size(), length, torch.float64)
    tensors = [*(tensor[:1] for tensor in tensors[:3]), tensors[3]]
    # The lse of a token without a sequence is −∞, and has no gradient.
    gradients = grad_out[:1], torch.where(torch.arange(total) < total - 5, grad_lse[:1], 0)
    boundaries = (cu_seqlens, cu_seqlens, longest, longest)
    for causal, options in itertools.product((True, False), ({}, {"window": 9}, {"dropout_p": 0.3}, {"halo": total})):
        without_halo = {name: value for name, value in options.items() if name != "halo"}
        whole = of_packed(alibi_attention_varlen, *boundaries, causal=causal, skip_tolerance=0.0, **without_halo)
        options = {"causal": causal, "skip_tolerance": 2**-50, "mesh": mesh, **options}
        attend = of_packed(context_attention_varlen, cu_seqlens, longest, **options)
        compare(mesh, whole, attend, tensors, gradients, length, 1e-11)


def a_tolerance_is_kept(mesh):
    """|out − exact| <= 2ε · max|value|, with an ε so large that the halo leaves out what would be seen."""
    length, tolerance = 96, 2e-2
    narrow = 0
    for seed, causal in itertools.product(range(4), (True, False)):
        (query, key, value, slopes), _ = inputs(mesh.size(), length, torch.float64, seed)
        value = value + 10 * torch.arange(mesh.size() * length)[:, None] / length  # far values are others
        exact = alibi_attention(query, key, value, slopes, causal=causal, skip_tolerance=0.0)
        shards = [own(tensor, mesh, length) for tensor in (query, key, value)]
        out = context_attention(*shards, slopes, mesh=mesh, causal=causal, skip_tolerance=tolerance)
        assert (out - own(exact, mesh, length)).abs().max() <= 2 * tolerance * value.abs().max()
        narrow += max(halo_widths(*shards[:2], slopes, mesh=mesh, causal=causal, skip_tolerance=tolerance)) < length
    assert narrow > 0


def far_keys_are_found(mesh):
    """One huge key in the first shard matters to the last one; heads without slope need all keys."""
    length = 100
    (query, key, value, _), _ = inputs(mesh.size(), length, torch.float64)
    for slopes in (SLOPES, torch.tensor([0.9, 0.6, 0.0, -0.01])):
        for factor in (1, 1000):
            larger = key.clone()
            larger[0, 0, 3] *= factor
            exact = alibi_attention(query, larger, value, slopes, skip_tolerance=0.0)
            shards = [own(tensor, mesh, length) for tensor in (query, larger, value)]
            out = context_attention(*shards, slopes, mesh=mesh, skip_tolerance=2**-50)
            torch.testing.assert_close(out, own(exact, mesh, length), rtol=0, atol=1e-11)
            widths = halo_widths(*shards[:2], slopes, mesh=mesh)
            context_attention(*shards, slopes, mesh=mesh, halo=widths)  # serves, as it says
            everything = (mesh.size() - 1) * length
            assert (widths[0] == everything) == (factor == 1000)
            assert (widths[1] == everything) == (slopes is not SLOPES or everything == length)


def far_queries_are_served(mesh):
    """A query in the middle of a shard that reaches beyond it, while those before it reach less far."""
    length, row = 200, 120
    torch.manual_seed(0)
    direction = torch.zeros(HEAD_DIM, dtype=torch.float64)
    direction[0] = 1
    key = direction.expand(1, 1, mesh.size() * length, HEAD_DIM).clone()
    value, query = torch.randn_like(key), 0.01 * torch.randn_like(key)
    for rank in range(1, mesh.size()):
        key[:, :, rank * length - 40 : rank * length] *= -1
        query[:, :, rank * length + row] = -55 * HEAD_DIM**0.5 * direction  # the scores of near keys are −55
    slopes = torch.tensor([0.9], dtype=torch.float64)
    exact = alibi_attention(query, key, value, slopes, skip_tolerance=0.0)
    shards = [own(tensor, mesh, length) for tensor in (query, key, value)]
    out = context_attention(*shards, slopes, mesh=mesh, skip_tolerance=2**-24)
    torch.testing.assert_close(out, own(exact, mesh, length), rtol=0, atol=1e-6)
    assert halo_widths(*shards[:2], slopes, mesh=mesh) == [128]


def both_sides_share_the_tolerance(mesh):
    length, slopes = 4096, torch.tensor([0.01])
    tokens = torch.ones(1, 1, length, 1)
    one_side = halo_widths(tokens, tokens, slopes, mesh=mesh, skip_tolerance=2**-24)
    assert 0 < one_side[0] < length
    assert halo_widths(tokens, tokens, slopes, mesh=mesh, skip_tolerance=2**-23, causal=False) == one_side


def padding_asks_for_nothing(mesh):
    (query, key, _, _), _ = inputs(mesh.size(), 100, torch.float32)
    mask = torch.rand(BATCH_SIZE, 100) > 0.3
    key = own(key, mesh, 100).masked_fill(~mask[:, None, :, None], float("nan"))
    assert halo_widths(own(query, mesh, 100), key, SLOPES, mesh=mesh, key_padding_mask=mask)[0] == 64


def compiled_calls_are_equal(mesh):
    """A graph without breaks does not wait for the device."""
    length = 100
    tensors, gradients = inputs(mesh.size(), length, torch.float32)
    shards = [*(own(tensor, mesh, length) for tensor in tensors[:3]), SLOPES]
    gradients = [own(gradient, mesh, length) for gradient in gradients]
    mask = torch.ones(BATCH_SIZE, length, dtype=torch.bool)
    for options in ({}, {"causal": False}, {"key_padding_mask": mask}, {"segment_length": 72}, {"segment_length": 8}):

        def attend(*tensors, options=options):
            return context_attention(*tensors, mesh=mesh, halo=[length, 3 * length], return_lse=True, **options)

        torch.manual_seed(1)
        eager = differentiate(attend, shards, gradients)
        torch.manual_seed(1)
        compiled = differentiate(torch.compile(attend, fullgraph=True, backend="aot_eager"), shards, gradients)
        for one, other in zip(eager, compiled, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda *tensors: context_attention(*tensors, SLOPES, mesh=mesh, halo=3 * length),
        fullgraph=True,
        backend=counter,
    )
    for shorter in (length, 80, 72, 60):
        compiled(*(tensor[:, :, :shorter] for tensor in shards[:3]))
    assert counter.frame_count <= 2, "lengths are dynamic"
    with pytest.raises(torch._dynamo.exc.Unsupported, match="halo"):
        torch.compile(lambda *tensors: context_attention(*tensors, mesh=mesh), fullgraph=True, backend="aot_eager")(
            *shards
        )


def only_the_halo_travels(mesh):
    """The collectives of a call, and the elements that the rank receives of keys and values."""
    length, halo = 96, [32, 64]
    tensors, (grad_out, _) = inputs(mesh.size(), length, torch.float32)
    shards = [(own(tensor, mesh, length) / 10).requires_grad_() for tensor in tensors[:3]]  # small norms
    exchange = module.exchange
    received = []

    def count(*arguments, **options):
        halos = exchange(*arguments, **options)
        received.append(sum(int((side != 0).sum()) for of_tensor in halos for side in of_tensor))
        return halos

    def collectives(**options):
        with CommDebugMode() as counted:
            out = context_attention(*shards, SLOPES, mesh=mesh, **options)
            out.backward(own(grad_out, mesh, length))
        return {str(name).split(".")[-1]: number for name, number in counted.get_comm_counts().items()}

    with mock.patch.object(module, "exchange", count):
        assert collectives(halo=halo, skip_tolerance=0.02) == {"all_reduce": 2, "all_to_all_single": 2}
    expected = 2 * BATCH_SIZE * HEAD_DIM * sum(halo) if mesh.get_local_rank() else 0
    assert received == [expected]
    assert collectives() == {"all_reduce": 2 + (mesh.size() > 2), "all_to_all_single": 2} or mesh.size() > 2
    assert collectives(halo=mesh.size() * length) == {"all_to_all_single": 2}  # nothing to check
    assert collectives(segment_length=32) == collectives(window=0) == {}


def edges_are_served(mesh):
    """No tokens, no sequences, no rows, and junk in tokens that no sequence holds."""
    none = torch.zeros(1, HEADS, 0, HEAD_DIM)
    assert context_attention(none, none, none, mesh=mesh, segment_length=4).shape == none.shape
    tokens = torch.randn(8, HEADS, HEAD_DIM)
    no_sequence = torch.zeros(1, dtype=torch.int32)
    by_sequence = torch.zeros(0, HEADS)
    out = context_attention_varlen(tokens, tokens, tokens, no_sequence, 8, by_sequence, mesh=mesh)
    assert not out.any()
    for options in ({}, {"causal": False}, {"dropout_p": 0.5}, {"segment_length": 8}, {"halo": 4}):
        rows = torch.randn(0, HEADS, 12, HEAD_DIM, requires_grad=True)
        slopes = SLOPES.clone().requires_grad_()
        mask = torch.ones(0, 12, dtype=torch.bool)
        out = context_attention(rows, rows, rows, slopes, mesh=mesh, key_padding_mask=mask, **options)
        assert out.shape == rows.shape
        out.sum().backward()
        assert rows.grad.shape == rows.shape
        assert not slopes.grad.any()
    length, is_last = 200, mesh.get_local_rank() == mesh.size() - 1
    query, key, value = torch.randn(3, length, HEADS, HEAD_DIM)
    if is_last:
        key[-3:] = float("nan")
    ends = torch.tensor([0, mesh.size() * length - 3], dtype=torch.int32)
    out = context_attention_varlen(query, key, value, ends, int(ends[1]), SLOPES, mesh=mesh, halo=[64, 64, 128, 192])
    assert out.isfinite().all()


def faults_are_named(mesh):
    """Those that are seen with several ranks; test_arguments.py has the others."""
    (query, key, value, _), _ = inputs(mesh.size(), 20, torch.float32)
    shards = [own(tensor, mesh, 20) for tensor in (query, key, value)]
    even = [tensor[:, :, :18] for tensor in shards]
    uneven = [tensor[:, :, : 20 - mesh.get_local_rank()] for tensor in shards]
    backwards = DeviceMesh("cpu", list(reversed(range(mesh.size()))))
    faults = [
        (ValueError, "mesh", shards, {"mesh": backwards}),
        (ValueError, "query", even, {"dropout_p": 0.1}),
        (ValueError, "segment_length", shards, {"segment_length": 6, "dropout_p": 0.1}),
        (RuntimeError, "halo", shards, {"halo": 4}),
        (RuntimeError, "query", uneven, {}),
    ]
    for error, name, tensors, options in faults:
        with pytest.raises(error, match=f"^{name}"):
            context_attention(*tensors, **{"mesh": mesh, **options})


CHECKS = (
    masks_hide_keys,
    packed_sequences_meet_one_device,
    a_tolerance_is_kept,
    far_keys_are_found,
    far_queries_are_served,
    both_sides_share_the_tolerance,
    padding_asks_for_nothing,
    only_the_halo_travels,
    edges_are_served,
    faults_are_named,
)


@pytest.mark.parametrize(("size", "grid"), first_fast([(2, FAST), (2, GRID), (3, FAST)]), ids=["fast", "all", "3"])
def test_one_device_is_met(size, grid):
    run_on_mesh(one_device_is_met, grid, world_size=size)


@pytest.mark.parametrize("size", first_fast([2, 3]))
@pytest.mark.parametrize("check", CHECKS)
def test_ranks(check, size):
    run_on_mesh(check, world_size=size)


@pytest.mark.slow
def test_compiled_ranks():
    run_on_mesh(compiled_calls_are_equal)
