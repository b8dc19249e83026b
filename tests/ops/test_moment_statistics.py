"""`seqwarm::moment_statistics`: all backends against float64; launches and compilation of the Triton kernel."""

import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from seqwarm_kernels.ops.library import overload

from ..support.backends import needs_interpreter, needs_native, serving
from ..support.kernels import CountedKernel, pretended
from ..support.tiers import first_fast

NAME = "moment_statistics"
SERVING = serving(NAME, None)
on_every_backend = pytest.mark.parametrize("backend", SERVING)
interpreted = needs_interpreter(NAME, None)


def plain(momentum, second_moment, gradients):
    """The five numbers, computed in plain Python."""
    first, second, grads = (
        [value for tensor in tensors for value in pairs(tensor).double().flatten().tolist()]
        for tensors in (momentum, second_moment, gradients)
    )
    roots, sizes = [math.sqrt(value) for value in second], [abs(value) for value in first]
    squares = math.fsum(value * value for value in grads)
    return [math.fsum(roots), max(roots, default=0), math.fsum(sizes), max(sizes, default=0), squares]


def pairs(tensor):
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def squares_of(tensors):
    squares = [pairs(tensor).double().square().to(pairs(tensor).dtype) for tensor in tensors]
    return [
        torch.view_as_complex(each) if tensor.is_complex() else each
        for each, tensor in zip(squares, tensors, strict=True)
    ]


def check(backend, momentum, second_moment, gradients):
    got = overload(NAME, backend)(momentum, second_moment, gradients)
    assert got.shape == (5,)
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(plain(momentum, second_moment, gradients), rel=1e-6, abs=0)
    return got


def of_one_dtype(dtype):
    return [torch.randn(shape, dtype=dtype) for shape in [(), (1,), (7, 3), (33, 65)]]


def views():
    """Of any strides and addresses."""
    whole = torch.randn(40, 50)
    halves = [tensor.bfloat16() for tensor in (whole.view(-1)[:99], whole)]
    found = [whole.t(), whole[:, ::3], whole.view(-1)[1:], whole.view(-1)[3:70], whole[5].expand(4, 50)]
    return [*found, halves[0][1:], halves[1].view(-1)[7:], torch.randn(50).double()[1:]]


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
TENSORS = {
    "several dtypes": lambda: [tensor for dtype in DTYPES[:-1] for tensor in of_one_dtype(dtype)],
    **{str(dtype): partial(of_one_dtype, dtype) for dtype in DTYPES},
    "views": views,
    "around blocks and chunks": lambda: [torch.randn(size) for size in (16385, 16384, 16383, 257, 256, 255)],
    "from 1e-15 to 1e15": lambda: [torch.randn(500) * 10.0**power for power in (-15, 0, 15)],
    "8 bits": lambda: [torch.randn(50).to(torch.float8_e5m2)],
}


@pytest.mark.parametrize("name", first_fast(TENSORS, "exhaustive_in_interpreter"))
@on_every_backend
def test_against_plain_numbers(backend, name):
    tensors = TENSORS[name]()
    check(backend, tensors, squares_of(tensors), tensors[::-1])


@pytest.mark.parametrize("backend", [backend for backend in SERVING if backend != "triton"])
def test_float64_is_not_rounded_to_float32(backend):
    """The Triton kernel rounds."""
    tensors = [torch.tensor([1e100, -3e100, 2e-100], dtype=torch.float64)]
    check(backend, tensors, squares_of(tensors), tensors)


@on_every_backend
def test_some_but_not_all_lists_may_be_empty(backend):
    some = [torch.tensor([-3.0])]
    assert overload(NAME, backend)(some, [], []).tolist() == [0, 0, 3, 3, 0]
    assert overload(NAME, backend)([], [], some).tolist() == [0, 0, 0, 0, 9]
    assert overload(NAME, backend)([torch.zeros(0)], [], [torch.zeros(3, 0)]).tolist() == [0] * 5
    assert overload(NAME, backend)([torch.zeros(0), *some], [], []).tolist() == [0, 0, 3, 3, 0]


def test_three_empty_lists_are_refused():
    with pytest.raises(ValueError, match="tensor"):
        overload(NAME, "reference")([], [], [])


@needs_native
def test_native_bits_do_not_depend_on_the_threads(threads):
    lists = [[torch.rand(n) for n in (3, 400_000, 17_000)] for _ in range(3)]
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(overload(NAME, "native")(*lists))
    assert all(torch.equal(found[0], other) for other in found)


@pytest.fixture
def small_sizes(monkeypatch):
    """A chunk of Triton's kernel has 16 elements, and a program reads two table entries or results at a time."""
    from seqwarm_kernels.ops.moment_statistics import triton as host

    for name, size in {"BLOCK": 16, "STEPS": 1, "CHUNK": 16, "SEARCH": 2}.items():
        monkeypatch.setattr(host, name, size)


@interpreted
@pytest.mark.parametrize(
    ("momentum", "second_moments", "gradients"),
    first_fast([(9, 1, 0), (2, 3, 1), (0, 1, 2), (17, 1, 0)]),
)
def test_more_tensors_and_chunks_than_a_program_reads_at_once(small_sizes, momentum, second_moments, gradients):
    """The lists share groups of chunks."""
    counts = momentum, second_moments, gradients
    lists = [[torch.randn(18 + 5 * (i == 0) - i % 3)[1:] for i in range(count)] for count in counts]
    for _ in range(2):  # the second launch finds the tickets at zero
        check("triton", lists[0], squares_of(lists[1]), lists[2])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", first_fast([0, 1, 2], "exhaustive_in_interpreter"))
@on_every_backend
def test_nan_and_infinity_affect_the_numbers_of_their_list_only(backend, which, bad):
    lists = [[torch.ones(20), torch.ones(3)] for _ in range(3)]
    lists[which][0][11] = bad
    got = overload(NAME, backend)(*lists).tolist()
    expected = [23.0, 1.0, 23.0, 1.0, 23.0]
    for index in {0: (2, 3), 1: (0, 1), 2: (4,)}[which]:
        expected[index] = bad
    assert got == pytest.approx(expected, nan_ok=True)


@interpreted
def test_one_launch_and_the_same_bits_each_time(small_sizes, monkeypatch):
    from seqwarm_kernels.ops.moment_statistics import triton as host

    counted = CountedKernel(monkeypatch, host, "moment_kernel")
    lists = [[torch.rand(n) for n in (3, 16, 17)] for _ in range(3)]
    results = [overload(NAME, "triton")(*lists) for _ in range(2)]
    assert counted.grids == [(3 * (1 + 1 + 2),)] * 2  # a program for each chunk
    assert torch.equal(*results)


@interpreted
def test_the_host_does_not_wait_for_the_table_of_a_pretended_gpu(monkeypatch):
    from seqwarm_kernels.ops.moment_statistics.triton import Span, make_table

    device, pinned = torch.device("cuda:0"), Mock()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned)
    with FakeTensorMode():
        table = make_table.__wrapped__(((Span(16, 3, torch.float32),), (), ()), device, 0)
    assert table.entries is pinned.to.return_value
    pinned.to.assert_called_once_with(device, non_blocking=True)
    assert table.tickets.is_cuda


@interpreted
def test_contents_are_read_again_if_addresses_are_cached(monkeypatch):
    tensor = torch.ones(8)
    assert overload(NAME, "triton")([tensor], [], []).tolist() == [0, 0, 8, 1, 0]
    tensor.mul_(-3)
    assert overload(NAME, "triton")([tensor], [], []).tolist() == [0, 0, 24, 3, 0]
    assert overload(NAME, "triton")([tensor[:4]], [], []).tolist() == [0, 0, 12, 3, 0]  # the same address
    assert overload(NAME, "triton")([], [], [tensor]).tolist() == [0, 0, 0, 0, 72]


@pytest.mark.slow
@pytest.mark.parametrize("chip", [80, 100])
def test_the_kernel_compiles_once_and_to_wide_loads(chip):
    pytest.importorskip("triton")
    report = pretended("moments", chip)
    assert report["kernels"] == 1
    assert report["spilled"] == 0
    assert report["wide_loads"] == 16  # 2048 items by 128 threads: 4 loads of float32, 2 and 2 of halves, 8 of float64
    assert report["late_loads"] > 0  # of results of other programs
    assert report["cached"] == 0


@pytest.mark.gpu
def test_on_the_device_the_same_exact_bits_and_no_wait():
    sizes = [(768, 768), (3072, 768), (768,), (50257, 192), (5, 3)] * 2
    lists = [[torch.rand(size, device="cuda") for size in sizes] for _ in range(3)]
    first = overload(NAME, "triton")(*lists)
    expected = overload(NAME, "reference")(*[[tensor.double() for tensor in tensors] for tensors in lists])
    torch.testing.assert_close(first, expected, rtol=1e-6, atol=0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [overload(NAME, "triton")(*lists) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.gpu
def test_it_cannot_be_captured_in_a_graph():
    tensors = [torch.ones(5, device="cuda")]
    overload(NAME, "triton")(tensors, tensors, tensors)
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        overload(NAME, "triton")(tensors, tensors, tensors)
