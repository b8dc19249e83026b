"""Without a standard error, as in a service, everything works without a progress bar."""

import io
import sys

import numpy as np
import torch

import seqwarm_kernels as sw
from seqwarm_kernels.cli import main
from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler, TokenSource, progress_bar, write_chunks
from seqwarm_kernels.tuning import Validation, tune_schedule
from seqwarm_kernels.utils.progress import standard_error


def test_calls_without_standard_error(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", None)
    write_chunks(["a", "b"], tmp_path / "chunks")

    np.array([1, 7], np.uint16).tofile(tmp_path / "a.bin")
    assert len(list(TokenSource(tmp_path / "a.bin", end_token=7))) == 1

    bar = progress_bar(LengthBatchSampler([1] * 30, BatchPlanner(3)), unit="item", total=30)
    assert sum(map(len, bar)) == 30

    def trial(scheduler, end):
        yield Validation(0, 10.0)
        yield Validation(end, 9.0)

    tune_schedule(trial, max_seq_length=32, learning_rate_warmup=4, min_seq_lengths=[8], durations=[10])

    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
    sw.warmup_allocator(model, 16, scheduler=sw.SequenceLengthScheduler(8, 16, duration=2))

    (tmp_path / "a.txt").write_text("one two three")
    assert main(["padding", "--text", str(tmp_path / "a.txt")]) == 0
    assert not capfd.readouterr().err


def test_where_bars_are_shown(monkeypatch):
    assert standard_error() is sys.stderr
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        assert not standard_error().isatty()
