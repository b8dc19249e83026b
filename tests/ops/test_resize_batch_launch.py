"""Launches of resize_batch: one for all tensors, from pinned memory, in graphs; and the compiled kernel."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from seqwarm_kernels import BatchBuffers, resize_batch
from seqwarm_kernels.ops.resize_batch.schema import Kind

from ..support.backends import needs_interpreter
from ..support.kernels import CountedKernel, pretended

triton = pytest.importorskip("triton")


def batch_of(tensors, rows=3, length=12, **where):
    return {f"tensor_{i}": torch.randint(100, (rows, length), **where) for i in range(tensors)}


interpreted = needs_interpreter("resize_batch", None)


@pytest.fixture
def counted(monkeypatch):
    from seqwarm_kernels.ops.resize_batch import triton as host

    return CountedKernel(monkeypatch, host, "resize_kernel")


@interpreted
@pytest.mark.parametrize("return_info", [False, True])
def test_one_launch_whatever_the_number_of_tensors(counted, return_info):
    resize_batch(batch_of(12), 5, return_info=return_info, backend="triton")
    assert len(counted.grids) == 1


@interpreted
def test_programs_for_all_groups_of_all_rows(counted):
    """4 · 2,500 tokens in groups of 16 bytes are 5,000 groups, of which a program moves 1,024. The row needs one."""
    batch = {"input_ids": torch.randint(100, (4, 3000)), "row": torch.randint(100, (4,))}
    resized = resize_batch(batch, 2500, backend="triton")
    assert torch.equal(resized["input_ids"], batch["input_ids"][:, :2500])
    assert counted.grids == [(5 + 1,)]


@interpreted
def test_launches_of_a_stream_share_a_running_total(monkeypatch):
    """Other streams have their own, and so has each launch of a graph, which may be replayed on any stream."""
    from seqwarm_kernels.ops.resize_batch import triton as host

    current = SimpleNamespace(cuda_stream=1, captures=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current.captures)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)

    def next_total(stream, captures=False):
        current.cuda_stream, current.captures = stream, captures
        total = host.running_total(torch.device("meta"))
        assert (total.dtype, total.shape, total.is_meta) == (torch.int64, (), True)
        return total

    first = next_total(1)
    assert next_total(1) is first
    assert next_total(2) is not first
    assert next_total(1, captures=True) is not first
    assert next_total(1, captures=True) is not next_total(1, captures=True)


@interpreted
@pytest.mark.parametrize(("length", "fits"), [(3, True), (4, False)])
def test_tokens_are_counted_up_to_a_limit(monkeypatch, length, fits):
    from seqwarm_kernels.ops.resize_batch import triton as host

    monkeypatch.setattr(host, "TICKET", SimpleNamespace(value=8))
    batch = {"ids": torch.ones(2, 4, dtype=torch.int64)}
    with nullcontext() if fits else pytest.raises(ValueError, match="counts fewer than 8 tokens, got 8"):
        resize_batch(batch, length, return_info=True, backend="triton")
    resize_batch(batch, length, backend="triton")


@interpreted
def test_layouts_are_constants_so_they_hold_nothing_that_is_not_used():
    """Another fill value compiles the kernel again only where it is written."""
    from seqwarm_kernels.ops.resize_batch import triton as host

    def layout(kind, rule):
        plan = host.make_plan(4, 4, 64, 32, rule)
        return host.make_layout(host.make_entry(INTS, INTS[:, :32], kind), plan, kind, rule, -100, torch.int64)

    assert layout(Kind.LABEL, "reshape_overlap") == (Kind.LABEL, 8, 2, -100, 1)
    assert layout(Kind.SEQUENCE, "reshape_overlap") == (Kind.SEQUENCE, 8, 2, 0, 1)
    assert layout(Kind.LABEL, "truncate") == (Kind.LABEL, 8, 2, 0, 1)
    assert layout(Kind.SEQUENCE, "reshape_pad") == (Kind.SEQUENCE, 8, 2, -100, 1)
    assert layout(Kind.SEQUENCE, "truncate_keep_last") == (Kind.SEQUENCE, 8, 1, 0, 1)


INTS = torch.zeros(4, 64, dtype=torch.int64)
BYTES = torch.zeros(4, 64, dtype=torch.uint8)
WIDTHS = [
    (INTS, 32, "truncate", 2),
    (BYTES, 32, "truncate", 16),
    (BYTES, 24, "truncate", 8),
    (INTS, 33, "truncate", 1),
    (BYTES[:, :40], 32, "truncate", 8),  # rows are 64 bytes apart, but hold 40 bytes
    (torch.zeros(4, 65, dtype=torch.uint8)[:, :64], 32, "truncate", 1),  # rows start at any address
    (torch.zeros(4, 128, dtype=torch.uint8)[:, ::2], 32, "truncate", 1),  # tokens are strided
    (torch.zeros(4, 64, 3, dtype=torch.uint8), 32, "truncate", 16),  # across tokens
    (INTS, 32, "truncate_keep_last", 1),
    (torch.zeros(4, 64, 24, dtype=torch.bfloat16), 33, "truncate_keep_last", 8),  # within tokens
    (torch.zeros(4, 64, 24, dtype=torch.bfloat16)[..., :20], 32, "truncate", 4),
    (torch.zeros(4, 24, 64, dtype=torch.bfloat16).transpose(1, 2), 32, "truncate", 1),
]


@pytest.mark.parametrize(("source", "new_length", "rule", "width"), WIDTHS)
def test_items_of_a_group_are_adjacent_in_source_and_output(source, new_length, rule, width):
    host = pytest.importorskip("seqwarm_kernels.ops.resize_batch.triton")
    rows, length = source.shape[:2]
    plan = host.make_plan(rows, rows, length, new_length, rule)
    entry = host.make_entry(source, source.new_empty(rows, new_length, *source.shape[2:]), Kind.SEQUENCE)
    assert host.group_width(entry, plan, Kind.SEQUENCE, rule == "truncate_keep_last") == width


def test_tensors_that_are_copied_alike_share_code():
    """Else the compiler takes minutes for hundreds of tensors. It knows only an alignment that all of them have."""
    host = pytest.importorskip("seqwarm_kernels.ops.resize_batch.triton")
    shifted = torch.zeros(4 * 64 + 1, dtype=torch.int64)[1:].view(4, 64)
    wide = torch.zeros(4, 128, dtype=torch.int64)[:, :64]
    sources = [INTS, BYTES, INTS.clone(), shifted, wide, INTS.double(), INTS.T.contiguous().T]
    plan = host.make_plan(4, 4, 64, 32, "truncate")
    entries = [host.make_entry(source, source.new_empty(4, 32), Kind.SEQUENCE) for source in sources]
    entries.append(host.make_entry(INTS, shifted[:, :32], Kind.SEQUENCE))
    layouts = [host.make_layout(entry, plan, Kind.SEQUENCE, "truncate", 0, entry.source.dtype) for entry in entries]
    bundles, bundle_layouts = host.bundle(entries, layouts)
    alike = [[0, 2, 5], [1], [3], [4], [6], [7]]
    assert bundle_layouts == tuple(layouts[first] for first, *_ in alike)
    for bundle, indices in zip(bundles, alike, strict=True):
        for place, index in enumerate(indices):
            assert bundle.source[place] is entries[index].source
            assert bundle.out[place] is entries[index].out
        assert bundle[2:] == entries[indices[0]][2:]


@pytest.mark.slow
@pytest.mark.parametrize("chip", [80, 120])
def test_the_kernels_compile_to_wide_moves_and_once_for_a_ramp(chip):
    report = pretended("resizing", chip)
    for rule, kernel in report["kernels"].items():
        assert kernel["spilled_bytes"] == 0, (rule, kernel)
        assert kernel["wide_loads"] >= 8, (rule, kernel)  # only of the features, where the last token is kept
        assert kernel["wide_stores"] >= 8, (rule, kernel)
    # One more for lengths at which a row of the mask is not a multiple of 16 bytes, and one of packed batches.
    assert report["ramp, rows, packed"] == [1, 0, 1]


@pytest.mark.gpu
def test_pinned_batches_are_read_in_place():
    """Of any strides, which pinning keeps. Rows that begin with padding are cut from their first valid token on."""
    batch = batch_of(3, rows=64, length=100)
    batch["attention_mask"] = torch.rand(64, 100) > 0.5
    batch["strided"] = torch.randint(100, (100, 64)).T
    batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    batch["part"] = torch.randint(100, (64, 200)).pin_memory()[:, 7:107]
    assert batch["strided"].stride() == (1, 64)
    buffers = BatchBuffers(batch, 100, device="cuda")
    for seq_len in (3, 40, 100):
        got, info = resize_batch(batch, seq_len, out=buffers, return_info=True)
        expected, expected_info = resize_batch(batch, seq_len, return_info=True, backend="reference")
        for name, tensor in expected.items():
            assert got[name].is_cuda
            assert torch.equal(got[name].cpu(), tensor), name
        assert all(torch.equal(got.cpu(), expected) for got, expected in zip(info, expected_info, strict=True))
    with pytest.raises(ValueError, match="must be on cuda:0 or in pinned memory"):
        resize_batch({name: tensor.clone() for name, tensor in batch.items()}, 3, out=buffers)


@pytest.mark.gpu
def test_a_captured_step_reads_the_current_batch():
    source = batch_of(2, rows=8, length=64, device="cuda")
    buffers = BatchBuffers(source, 64)
    graphs = {}
    for seq_len in (16, 64):
        resize_batch(source, seq_len, out=buffers, return_info=True)  # compiles
        graphs[seq_len] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[seq_len]):
            results, info = resize_batch(source, seq_len, out=buffers, return_info=True)
            doubled = results["tensor_0"] * 2
        graphs[seq_len] = graphs[seq_len], doubled, info
    for seq_len, (graph, doubled, info) in graphs.items():
        source["tensor_0"].random_(100)
        graph.replay()
        assert torch.equal(doubled, 2 * source["tensor_0"][:, :seq_len])
        assert info.num_valid_tokens.item() == 8 * seq_len
