"""A process whose standard error is closed, as that of a service, works without a progress bar."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from seqwarm_kernels.utils.progress import standard_error

CALLS = {
    "write_chunks": "from seqwarm_kernels.data import write_chunks; write_chunks(['a', 'b'], 'chunks')",
    "TokenSource": (
        "import numpy as np; np.array([1, 7], np.uint16).tofile('a.bin')\n"
        "from seqwarm_kernels.data import TokenSource; list(TokenSource('a.bin', end_token=7))"
    ),
    "progress_bar": (
        "from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler, progress_bar\n"
        "bar = progress_bar(LengthBatchSampler([1] * 30, BatchPlanner(3)), unit='item', total=30)\n"
        "assert sum(map(len, bar)) == 30"
    ),
    "tune_schedule": (
        "from seqwarm_kernels.tuning import Validation, tune_schedule\n"
        "def trial(scheduler, end):\n    yield Validation(0, 10.0)\n    yield Validation(end, 9.0)\n"
        "tune_schedule(trial, max_seq_length=32, learning_rate_warmup=4, min_seq_lengths=[8], durations=[10])"
    ),
    "warmup_allocator": (
        "import torch, seqwarm_kernels as sw\n"
        "model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))\n"
        "scheduler = sw.SequenceLengthScheduler(8, 16, duration=2)\n"
        "sw.warmup_allocator(model, 16, scheduler=scheduler)"
    ),
    "padding": (
        "open('a.txt', 'w').write('one two three')\n"
        "from seqwarm_kernels.cli import main; assert main(['padding', '--text', 'a.txt']) == 0"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_without_standard_error(tmp_path, name):
    code = f"import sys; assert sys.stderr is None\n{CALLS[name]}\nprint('done')"
    (tmp_path / "call.py").write_text(code)
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    command, environment = f"exec {sys.executable} call.py 2>&-", {**os.environ, "PYTHONPATH": paths}
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
