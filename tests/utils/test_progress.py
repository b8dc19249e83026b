"""A process whose standard error is closed, as that of a service, works without a progress bar."""

import io
import os
import subprocess
import sys
from pathlib import Path

from seqwarm_kernels.utils.progress import standard_error

CALLS = """
import sys
assert sys.stderr is None
import numpy as np, torch, seqwarm_kernels as sw
from seqwarm_kernels.cli import main
from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler, TokenSource, progress_bar, write_chunks
from seqwarm_kernels.tuning import Validation, tune_schedule

write_chunks(["a", "b"], "chunks")

np.array([1, 7], np.uint16).tofile("a.bin")
list(TokenSource("a.bin", end_token=7))

bar = progress_bar(LengthBatchSampler([1] * 30, BatchPlanner(3)), unit="item", total=30)
assert sum(map(len, bar)) == 30

def trial(scheduler, end):
    yield Validation(0, 10.0)
    yield Validation(end, 9.0)

tune_schedule(trial, max_seq_length=32, learning_rate_warmup=4, min_seq_lengths=[8], durations=[10])

model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
sw.warmup_allocator(model, 16, scheduler=sw.SequenceLengthScheduler(8, 16, duration=2))

open("a.txt", "w").write("one two three")
assert main(["padding", "--text", "a.txt"]) == 0
print("done")
"""


def test_calls_without_standard_error(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    command, environment = f"exec {sys.executable} calls.py 2>&-", {**os.environ, "PYTHONPATH": paths}
    result = subprocess.run(
        ["sh", "-c", command], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert result.stdout.endswith("done\n")


def test_where_bars_are_shown(monkeypatch):
    assert standard_error() is sys.stderr
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        assert not standard_error().isatty()
