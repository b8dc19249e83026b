"""Launches of resize_batch: one for all tensors, from pinned memory, in graphs; and the compiled kernel."""

import json
import os
import subprocess
import sys

import pytest
import torch

from seqwarm_kernels import BatchBuffers, resize_batch
from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.resize_batch.schema import Kind
from tests.support.tiers import first_fast

from ..support.kernels import CountedKernel

triton = pytest.importorskip("triton")


def batch_of(tensors, rows=3, length=12, **where):
    return {f"tensor_{i}": torch.randint(100, (rows, length), **where) for i in range(tensors)}


@pytest.mark.skipif(
    backends.why_not("resize_batch", "triton", "cpu") is not None, reason="Triton's interpreter does not serve here"
)
@pytest.mark.parametrize("tensors", first_fast([40, 1, 2, 16]))
@pytest.mark.parametrize("return_info", [False, True])
def test_one_launch_whatever_the_number_of_tensors(monkeypatch, tensors, return_info):
    from seqwarm_kernels.ops.resize_batch import triton as host

    counted = CountedKernel(host.resize_kernel)
    monkeypatch.setattr(host, "resize_kernel", counted)
    resize_batch(batch_of(tensors), 5, return_info=return_info, backend="triton")
    assert counted.launches == 1


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


@pytest.mark.slow
@pytest.mark.parametrize("chip", [80, 90, 100])
def test_the_kernel_compiles_to_wide_moves_and_once_for_a_ramp(chip):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.pretend_resize", str(chip)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    for rule, kernel in report["kernels"].items():
        assert kernel["spilled_bytes"] == 0, (rule, kernel)
        assert kernel["wide_loads"] >= 8, (rule, kernel)  # only of the features, where the last token is kept
        assert kernel["wide_stores"] >= 8, (rule, kernel)
    assert report["ramp"] == 1  # for lengths at which a row of the mask is not a multiple of 16 bytes
    assert report["rows"] == 0


GPU_BACKENDS = [name for name in ("native", "triton") if backends.why_not("resize_batch", name, "cuda") is None]


@pytest.mark.gpu
@pytest.mark.parametrize("return_info", [False, True])
@pytest.mark.parametrize("tensors", [1, 16, 100])
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_one_launch_on_the_device(backend, tensors, return_info):
    batch = batch_of(tensors, device="cuda")
    resize_batch(batch, 5, return_info=return_info, backend=backend)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        resize_batch(batch, 5, return_info=return_info, backend=backend)
        torch.cuda.synchronize()
    started = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(started) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_pinned_batches_are_read_in_place(backend):
    batch = {name: tensor.pin_memory() for name, tensor in batch_of(3, rows=64, length=100).items()}
    batch["attention_mask"] = (torch.rand(64, 100) > 0.5).pin_memory()
    buffers = BatchBuffers(batch, 100, device="cuda")
    for seq_len in (3, 40, 100):
        got, info = resize_batch(batch, seq_len, out=buffers, return_info=True, backend=backend)
        for name, tensor in batch.items():
            assert got[name].is_cuda
            assert torch.equal(got[name].cpu(), tensor[:, :seq_len])
        assert info.num_valid_tokens.item() == batch["attention_mask"][:, :seq_len].sum()
    with pytest.raises(ValueError, match="must be on cuda:0, where out= writes, or in pinned host memory"):
        resize_batch({name: tensor.clone() for name, tensor in batch.items()}, 3, out=buffers, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_captured_step_reads_the_current_batch(backend):
    source = batch_of(2, rows=8, length=64, device="cuda")
    buffers = BatchBuffers(source, 64)
    graphs = {}
    for seq_len in (16, 64):
        resize_batch(source, seq_len, out=buffers, return_info=True, backend=backend)  # compiles
        graphs[seq_len] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[seq_len]):
            results, info = resize_batch(source, seq_len, out=buffers, return_info=True, backend=backend)
            doubled = results["tensor_0"] * 2
        graphs[seq_len] = graphs[seq_len], doubled, info
    for seq_len, (graph, doubled, info) in graphs.items():
        source["tensor_0"].random_(100)
        graph.replay()
        assert torch.equal(doubled, 2 * source["tensor_0"][:, :seq_len])
        assert info.num_valid_tokens.item() == 8 * seq_len
