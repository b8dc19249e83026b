"""Bytes that ranks receive: the formulas against exchanges played with single tokens, and against bytes of runs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.parallel.cpu import FLAT, USUAL, ReceivedBytes, count_on_rank
from seqwarm_kernels.cli.exchanges import ContextSize, Exchanges, Volume, normal_widths
from seqwarm_kernels.parallel import halo_widths, heads_to_tokens, tokens_to_heads

from .support.ranks import run_on_mesh
from .support.tiers import examples

SIZES = st.builds(
    lambda ranks, shard, key_heads, group, **options: ContextSize(
        key_heads * group, key_heads, length=ranks * shard, ranks=ranks, **options
    ),
    ranks=st.integers(1, 6),
    shard=st.integers(1, 5),
    key_heads=st.integers(1, 6),
    group=st.integers(1, 3),
    head_dim=st.integers(1, 8),
    batch_size=st.integers(1, 3),
    causal=st.booleans(),
    bytes_per_element=st.sampled_from([2, 4, 8]),
)


def vector(size):
    """Bytes of one vector of a head, in all rows."""
    return size.batch_size * size.head_dim * size.bytes_per_element


def received_in_ring(size, steps):
    """Bytes that rank 0 receives if every rank passes on the keys and values that it holds."""
    holds, received = list(range(size.ranks)), 0
    for _ in range(steps):
        holds = [holds[rank - 1] for rank in range(size.ranks)]
        received += 2 * size.key_heads * size.shard_length * vector(size)
    return received, holds


@examples(30)
@given(SIZES)
def test_ring(size):
    forward, holds = received_in_ring(size, size.ranks - 1)
    assert holds == [(rank + 1) % size.ranks for rank in range(size.ranks)], "every shard has been everywhere"
    home, holds = received_in_ring(size, size.ranks if size.ranks > 1 else 0)
    assert holds == list(range(size.ranks)), "gradients are back at home"
    assert size.ring() == Volume(forward, forward + home)


@examples(30)
@given(SIZES)
def test_ulysses(size):
    """Rank 0 needs all tokens of its heads, and has its own. Outputs go the other way."""
    if size.heads % size.ranks or size.key_heads % size.ranks:
        assert f"must be a multiple of the {size.ranks} ranks, got" in size.ulysses()
        return
    received = 0
    for heads in (size.heads, size.key_heads, size.key_heads):
        received += heads // size.ranks * (size.length - size.shard_length) * vector(size)
    received += (size.heads - size.heads // size.ranks) * size.shard_length * vector(size)
    assert size.ulysses() == Volume(received, received)


@examples(30)
@given(SIZES, st.data())
def test_halo(size, data):
    """Token by token: who sends which one to whom."""
    widths = data.draw(st.lists(st.integers(0, 40), min_size=size.key_heads, max_size=size.key_heads))
    received, sent = [0] * size.ranks, [0] * size.ranks
    for width in widths:
        for rank in range(size.ranks):
            first, end = rank * size.shard_length, (rank + 1) * size.shard_length
            tokens = [t for t in range(first - width, first) if t >= 0]
            tokens += [] if size.causal else [t for t in range(end, end + width) if t < size.length]
            received[rank] += len(tokens)
            for token in tokens:
                sent[token // size.shard_length] += 1
    bytes_of = [Volume(2 * r * vector(size), 2 * s * vector(size)) for r, s in zip(received, sent, strict=True)]
    assert [size.halo(widths, rank) for rank in range(size.ranks)] == bytes_of
    assert size.halo(widths) == tuple(map(max, zip(*bytes_of, strict=True)))


# ---- widths


def test_widths_of_normal_inputs_do_not_depend_on_the_length():
    size = ContextSize(4, 4, 16, 2**14, 8)
    widths = normal_widths(size)
    assert widths[0] < widths[1] < widths[2] < size.length // 2
    assert normal_widths(size) == widths
    assert normal_widths(size, seed=1) == pytest.approx(widths, rel=0.15)
    assert normal_widths(replace(size, ranks=2)) == pytest.approx(widths, rel=0.15)
    assert normal_widths(replace(size, length=2**15)) == pytest.approx(widths, rel=0.15)
    assert min(normal_widths(size, score_std=3)) > 1.3 * min(widths)


def test_widths_of_key_heads_are_the_largest_of_their_group():
    shared, alone = (normal_widths(ContextSize(4, key_heads, 16, 2**13, 2)) for key_heads in (2, 4))
    assert shared == pytest.approx([alone[1], alone[3]], rel=0.15)


def test_a_row_that_is_too_long_to_draw():
    size = ContextSize(4, 4, 16, 2**20, 4)
    widths = normal_widths(size, most_tokens=2**12)
    assert widths[:2] == normal_widths(replace(size, length=2**12))[:2]
    assert widths[3] == 3 * 2**18, "it reaches all drawn tokens"


# ---- a run


RUNS = [
    (ContextSize(4, 2, 16, 1024, 2), USUAL),
    (ContextSize(4, 4, 16, 2048, 2, batch_size=2, causal=False), USUAL),
    (ContextSize(6, 2, 8, 64, 2), FLAT),
]


def runs_receive_what_the_formula_says(mesh):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for each, slopes in RUNS:
        size = replace(each, ranks=ranks)
        found = count_on_rank(mesh, size, slopes)
        received = found["forward"], found["backward"]
        assert received == (found["formula_forward"], found["formula_backward"]), size
        assert sum(received) > 0
        if slopes == FLAT and rank == ranks - 1:
            assert found["forward"] == size.all_gather().forward


def ulysses_receives_the_same_bytes(mesh):
    ranks = mesh.size()
    size = ContextSize(8, 4, 16, 12 * ranks, ranks, batch_size=3, bytes_per_element=4)
    tensors = [torch.randn(3, heads, 12, 16, requires_grad=True) for heads in (8, 4, 4)]
    with ReceivedBytes(mesh.get_local_rank(), ranks) as counted:
        exchanged = [tokens_to_heads(tensor, mesh) for tensor in tensors]
        out = heads_to_tokens(exchanged[0], mesh)
        assert counted.received["all_to_all_single"] == size.ulysses().forward
        (out.sum() + sum(each.sum() for each in exchanged)).backward()
    assert counted.received["all_to_all_single"] == sum(size.ulysses())


def widths_are_those_of_normal_inputs(mesh):
    """normal_widths draws a shard after the other, the key first."""
    torch.manual_seed(7)
    ranks = mesh.size()
    drawn = [torch.randn(1, 2, 2**13, 8) for _ in range(ranks)][mesh.get_local_rank()]
    (exact,) = halo_widths(drawn[:, 1:] / 2, drawn[:, :1], mesh=mesh)
    assert exact < (ranks - 1) * 2**13, "not all tokens"
    (found,) = normal_widths(ContextSize(1, 1, 8, ranks * 2**13, ranks), score_std=0.5, seed=7)
    assert exact <= found <= 1.1 * exact


@pytest.mark.parametrize(
    "check",
    [runs_receive_what_the_formula_says, ulysses_receives_the_same_bytes, widths_are_those_of_normal_inputs],
)
def test_a_run(check):
    run_on_mesh(check, world_size=2)


# ---- the table


def test_the_table_and_what_is_not_possible():
    exchanges = Exchanges(ContextSize(12, 12, 64, 1024, 8), [64] * 11 + [512])
    title, header, ring, gather, ulysses, halo, note = exchanges.table().splitlines()
    assert title.endswith("heads: 12, key heads: 12, head_dim: 64, tokens: 1,024, ranks: 8, rows: 1, bits: 16")
    assert header.split() == ["forward", "backward", "times", "fewer", "than", "a", "ring"]
    assert ring.split() == ["ring", "2.75", "MB", "5.9", "MB", "1.0"]
    assert gather.split() == ["all-gather", "2.75", "MB", "2.75", "MB", "1.6"]
    assert ulysses.endswith("not possible: heads must be a multiple of the 8 ranks, got 12")
    assert halo.split() == ["halo", "0.311", "MB", "0.311", "MB", "13.9"]
    assert "64 to 512 tokens" in note
    json = exchanges.to_json()
    assert json["bytes_received"]["Ulysses"] == {"not_possible": "heads must be a multiple of the 8 ranks, got 12"}
    assert json["bytes_received"]["halo"] == {"forward": 256 * 1216, "backward": 256 * 1216}
    assert json["halo_widths"] == [64] * 11 + [512]
