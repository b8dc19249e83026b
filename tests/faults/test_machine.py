"""Full disks, folders that cannot be written, unusual paths, several threads, and both kinds of worker processes."""

import os
import resource
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import DataLoader

from seqwarm_kernels.data import BatchPlanner, ChunkSource, LengthBatchSampler, PaddedCollator, write_chunks
from seqwarm_kernels.diagnostics import JsonLines, TrainingMonitor

from ..support.tiers import first_fast

ITEMS = [f"line {number} " + "word " * (number % 7) for number in range(300)]


@contextmanager
def full_disk(free_bytes):
    """No file of this process can grow beyond `free_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def monitored(path, steps):
    """Train, and write a record of each step to `path`."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    with TrainingMonitor(optimizer, JsonLines(path), read_every=1) as monitor:
        for _ in range(steps):
            loss = parameter.square().sum()
            loss.backward()
            optimizer.step()
            monitor.observe(loss)


def test_write_chunks_on_a_full_disk(tmp_path):
    folder = tmp_path / "chunks"
    with full_disk(200), pytest.raises(OSError, match=f"File too large: '{folder}"):
        write_chunks(ITEMS, folder, 100)
    assert not list(folder.glob("*.partial"))
    write_chunks(ITEMS, folder, 100)
    assert len(list(ChunkSource(folder))) == len(ITEMS)


@pytest.mark.filterwarnings("ignore:the monitor could not be closed")
def test_the_monitor_on_a_full_disk(tmp_path):
    path = tmp_path / "monitor.jsonl"
    monitored(path, 3)
    before = path.read_text()
    with full_disk(len(before) + 10), pytest.raises(OSError, match=f"File too large: '{path}'"):
        monitored(path, 20)
    kept = path.read_text() + path.with_name("monitor.jsonl.replaced").read_text()
    assert all(line in kept for line in before.splitlines())
    monitored(path, 3)


@pytest.mark.parametrize("name", ["größe 文字 🙂", "a" * 200, "/".join(["deep"] * 60), "with spaces and 'quotes'"])
def test_paths(name, tmp_path):
    folder = tmp_path / name
    write_chunks(ITEMS, folder / "chunks", 100)
    assert len(list(ChunkSource(folder / "chunks"))) == len(ITEMS)
    monitored(folder / "monitor.jsonl", 2)
    assert (folder / "monitor.jsonl").read_text().count("\n") == 2


EIGHT_THREADS = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
import torch
begin = Barrier(8)
query = torch.randn(1, 2, 40, 16)
batch = {"input_ids": torch.arange(64).view(2, 32)}

def first_call(_):
    begin.wait()
    import seqwarm_kernels as sw
    return sw.alibi_attention(query, query, query), sw.resize_batch(batch, 8)["input_ids"], sw.data.BatchPlanner(8)

with ThreadPoolExecutor(8) as pool:
    results = list(pool.map(first_call, range(8)))
assert all(torch.equal(result[0], results[0][0]) and torch.equal(result[1], results[0][1]) for result in results)
"""


@pytest.mark.slow
def test_first_calls_from_several_threads_with_a_home_and_caches_that_cannot_be_written():
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "MPLCONFIGDIR"), "/proc/nowhere")
    command = [sys.executable, "-c", EIGHT_THREADS]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **nowhere})
    assert result.returncode == 0, result.stderr


def collated(context):
    lengths = [index % 9 + 1 for index in range(60)]
    dataset = [[index] * length for index, length in enumerate(lengths)]
    sampler = LengthBatchSampler(lengths, BatchPlanner(32), window=20)
    workers = {"num_workers": 1, "multiprocessing_context": context} if context else {}
    return list(DataLoader(dataset, batch_sampler=sampler, collate_fn=PaddedCollator(), **workers))


@pytest.mark.parametrize("context", first_fast(["fork", "spawn"]))
def test_worker_processes(context):
    for batch, expected in zip(collated(context), collated(None), strict=True):
        assert all(torch.equal(batch[name], tensor) for name, tensor in expected.items())
