"""Small Gluon kernels on CPU threads: their results, and that each fault of their barriers is found."""

import sys
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.support.gluon import Descriptor, ProtocolError, launch, unnoticed

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


# ---- the emulator itself, with a sum of products


@gluon.jit
def produce(
    left, right, lefts, rights, full, empty, count, ROWS: gl.constexpr, STAGES: gl.constexpr, FAULT: gl.constexpr
):
    for i in range(count):
        slot = i % STAGES
        if FAULT != "overwritten":
            mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(slot), left.block_type.nbytes + right.block_type.nbytes)
        load_tile(left, [0, i * ROWS], full.index(slot), lefts.index(slot))
        load_tile(right, [i * ROWS, 0], full.index(slot), rights.index(slot))


@gluon.jit
def consume(lefts, rights, full, empty, Out, count, ROWS: gl.constexpr, STAGES: gl.constexpr, FAULT: gl.constexpr):
    total = gl.zeros([ROWS, ROWS], gl.float32)
    for i in range(count):
        slot = i % STAGES
        if FAULT != "early":
            mbarrier.wait(full.index(slot), i // STAGES & 1)
        total = warpgroup_mma(lefts.index(slot), rights.index(slot), total, is_async=True)
        if FAULT == "released early":
            mbarrier.arrive(empty.index(slot))
        total = warpgroup_mma_wait(1 if FAULT == "in flight" else 0, deps=(total,))
        if FAULT == "in flight":
            total = total * 1.0
        if FAULT != "deadlock" and FAULT != "released early":
            mbarrier.arrive(empty.index(slot), count=2 if FAULT == "arrivals" else 1)
    rows = gl.arange(0, ROWS)
    gl.store(Out + rows[:, None] * ROWS + rows[None, :], total)
    if FAULT == "store":
        gl.store(Out + (rows + ROWS * ROWS - 1), rows.to(gl.float32))


@gluon.jit
def multiply(left, right, Out, count, ROWS: gl.constexpr, STAGES: gl.constexpr, FAULT: gl.constexpr):
    lefts = gl.allocate_shared_memory(left.dtype, [STAGES, ROWS, ROWS], left.layout)
    rights = gl.allocate_shared_memory(right.dtype, [STAGES, ROWS, ROWS], right.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        if FAULT != "init":
            mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (lefts, rights, full, empty, Out, count, ROWS, STAGES, FAULT)),
            (produce, (left, right, lefts, rights, full, empty, count, ROWS, STAGES, FAULT)),
        ],
        [1],
        [24],
    )


def multiplied(seed=0, fault="", width=80, mutation=None):
    """The largest error of a product of 16 rows, whose last tile may end outside, and the run."""
    numbers = np.random.default_rng(1)
    left, right = (numbers.standard_normal(shape).astype(np.float32) for shape in ((16, width), (width, 16)))
    out = np.full((16, 16), np.nan, np.float32)
    arguments = {"left": Descriptor(left, [16, 16]), "right": Descriptor(right, [16, 16]), "Out": out}
    arguments |= {"count": -(-width // 16), "ROWS": 16, "STAGES": 2, "FAULT": fault}
    run = launch(multiply, (1,), arguments, seed=seed, mutation=mutation)
    return np.abs(out - left.astype(np.float64) @ right).max(), run


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("width", [16, 80, 75])
def test_products(seed, width):
    """A copy from outside of a tensor brings zeros."""
    error, _ = multiplied(seed, width=width)
    assert error < 1e-5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("fault", "words"),
    {
        "deadlock": r"partition 1 \(produce\) waits for the end of phase 0 of empty\[0\] \(in phase 0, 1 of 1",
        "early": "a product touches a tile (without a wait for its write|that nobody has written)",
        "overwritten": "a copy touches a tile (without a wait|that)|more arrivals",
        "released early": r"a copy touches a tile that (is still read|partition 0 \(consume\) may still read)",
        "in flight": "a product's result is read before a wait that returns it",
        "arrivals": r"more arrivals than expected at empty\[0\]",
        "init": r"full\[0\] is used before its init",
        "store": "a store outside of a tensor: items 255 to 270 of 256",
    }.items(),
)
def test_faults_are_found_whatever_the_schedule(seed, fault, words):
    with pytest.raises(ProtocolError, match=words):
        multiplied(seed, fault)


def test_a_seed_gives_one_schedule():
    messages = set()
    for _ in range(3):
        with pytest.raises(ProtocolError) as error:
            multiplied(4, "overwritten")
        messages.add(str(error.value))
    assert len(messages) == 1


def test_mutations_of_products_are_found():
    mutations = multiplied()[1].mutations()
    changes = Counter((mutation.site.operation, mutation.change) for mutation in mutations)
    assert changes == {
        ("init", "one more"): 2,
        ("wait", "another phase"): 2,
        ("wait", "left out"): 2,
        ("expect", "half the bytes"): 1,
        ("arrive", "left out"): 1,
        ("arrive", "doubled"): 1,
        ("warpgroup_mma_wait", "one more"): 1,
    }
    assert unnoticed(mutations, lambda **how: multiplied(**how)[0] < 1e-5) == []


def test_waits_that_cannot_matter_are_no_mutations():
    """Two tiles in two stages: the producer never waits."""
    mutations = multiplied(width=32)[1].mutations()
    left_out = [each.barriers for each in mutations if each.site.operation == "wait" and each.change == "left out"]
    assert left_out == [{"full"}]


@gluon.jit
def double(source, target, count, FAULT: gl.constexpr):
    loaded = gl.allocate_shared_memory(source.dtype, [8, 16], source.layout)
    stored = gl.allocate_shared_memory(target.dtype, [8, 16], target.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(full, count=1)
    for i in range(count):
        mbarrier.expect(full, source.block_type.nbytes)
        load_tile(source, [i * 8, 0], full, loaded)
        mbarrier.wait(full, i & 1)
        if FAULT != "no wait":
            tma.store_wait(0)
        stored.store(loaded.load() * 2)
        if FAULT != "no fence":
            fence_async_shared()
        store_tile(target, [i * 8, 0], stored)
    if FAULT != "no last wait":
        tma.store_wait(0)


def doubled(seed=0, fault="", mutation=None):
    """The largest error of tensors of 16-bit numbers that a GPU would get, and the run."""
    layout = gl.NVMMASharedLayout.get_default_for([8, 16], gl.bfloat16)
    source, target = torch.randn(20, 16).bfloat16(), torch.full((24, 16), torch.nan, dtype=torch.bfloat16)
    tiles = {"source": TensorDescriptor.from_tensor(source, [8, 16], layout)}
    tiles["target"] = TensorDescriptor.from_tensor(target[:20], [8, 16], layout)
    run = launch(double, (1,), {**tiles, "count": 3, "FAULT": fault}, seed=seed, mutation=mutation)
    assert target[20:].isnan().all()
    return (target[:20] - 2 * source).abs().max().item(), run


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no wait", "a store touches a tile that is still read: the kernel: double, line"),
        ("no last wait", "the kernel ends without a wait: the kernel: double, line"),
        ("no fence", "a copy touches a tile without a fence after its write"),
    ],
)
def test_copies_into_global_memory(fault, words):
    error, run = doubled()
    assert error == 0
    assert unnoticed(run.mutations(), lambda **how: doubled(**how)[0] == 0) == []
    with pytest.raises(ProtocolError, match=words):
        doubled(fault=fault)


# ---- the language


class Sizes(NamedTuple):
    tokens: int
    width: int


@gluon.jit
def larger(left, right):
    return gl.maximum(left, right)


@gluon.jit
def speak(tiles, Numbers, Out, Count, Nothing, sizes, offset, scale, ROWS: gl.constexpr, D: gl.constexpr):
    """Many words of the language at once."""
    HALF: gl.constexpr = ROWS // 2
    gl.static_assert(HALF * 2 == ROWS)
    tile = gl.allocate_shared_memory(tiles.dtype, [2, 1, 1, ROWS, D], tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(full, count=1)
    mbarrier.expect(full, tiles.block_type.nbytes)
    load_tile(tiles, [gl.program_id(0), 1, sizes.tokens - HALF, 0], full, tile.index(1))
    mbarrier.wait(full, 0)
    values = tile.index(1).reshape([ROWS, D]).load(gl.SliceLayout(0, None))  # zero from HALF on
    before = values
    values += 1.0
    values -= gl.expand_dims(gl.zeros([ROWS], gl.float32), 1)
    index = gl.arange(0, ROWS)
    rest = gl.load(Numbers + index, mask=index < sizes.width, other=-7)
    total = gl.sum(values - before, axis=1) + rest.to(gl.float32)  # D + rest
    total += (offset.to(gl.int64) // 2 + offset % 2).to(gl.float32)  # -3 // 2 + -3 % 2 = -2
    if Nothing is None:
        total = gl.fma(total, scale, 0.25)
    total = gl.maximum(gl.minimum(gl.abs(-total), 1e6), 0)
    total = gl.where(total == gl.max(total, 0), -total, total)
    scratch = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    scratch.store(total)
    barrier()
    total = scratch.load(gl.SliceLayout(0, None)) + this.larger(gl.max(rest, 0), -9) + gl.cdiv(ROWS, 3)
    place = gl.atomic_add(Count, 1)
    gl.store(Out + place * ROWS + index[None, :], total[None, :], mask=(index < ROWS - 1)[None, :])


barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
this = sys.modules[__name__]


def test_words_of_the_language():
    numbers, out, count = np.arange(5, dtype=np.int32), np.full((3, 16), np.nan, np.float32), np.zeros(1, np.int32)
    tiles = Descriptor(np.ones((3, 2, 30, 4), np.float32), [1, 1, 16, 4], gl.float16)
    arguments = {"tiles": tiles, "Numbers": numbers, "Out": out, "Count": count, "Nothing": None}
    arguments |= {"sizes": Sizes(30, 5), "offset": -3, "scale": 0.5, "ROWS": 16, "D": 4}
    launch(speak, (3,), arguments)
    expected = np.abs((4 + np.where(np.arange(16) < 5, np.arange(16), -7) - 2) * 0.5 + 0.25)
    expected[4] *= -1  # the largest
    assert count == 3
    assert (out[:, :15] == expected[:15] + 4 + 6).all()
    assert np.isnan(out[:, 15]).all()


@gluon.jit
def store_twice(Out):
    gl.store(Out, 1.0)


def test_two_programs_store_one_item():
    with pytest.raises(ProtocolError, match=r"program \(., 0, 0\): .* two partitions store the same item"):
        launch(store_twice, (2,), {"Out": np.zeros(1, np.float32)})
