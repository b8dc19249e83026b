"""Each argument of the diagnostics replaced by values that make no sense: accepted, or refused by its name."""

import os

import numpy as np
import pytest
import torch

from seqwarm_kernels.diagnostics import JsonLines, TensorBoard, TrainingMonitor, moment_statistics

from ..support.arguments import check_accepted_or_named


def adamw():
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])


def monitor(optimizer, output, spike_threshold, read_every):
    TrainingMonitor(optimizer, output, spike_threshold=spike_threshold, read_every=read_every)


def observe(loss, grad_norm, rate):
    with TrainingMonitor(adamw()) as monitor:
        monitor.observe(loss, grad_norm=grad_norm, rate=rate)


def load(steps, spikes, min_loss, max_loss_ratio):
    TrainingMonitor(adamw()).load_state_dict(
        {"steps": steps, "spikes": spikes, "min_loss": min_loss, "max_loss_ratio": max_loss_ratio}
    )


CALLS = [
    (monitor, {"optimizer": adamw(), "output": print, "spike_threshold": 1.2, "read_every": 20}),
    (observe, {"loss": 1.0, "grad_norm": 1.0, "rate": 0.1}),
    (load, {"steps": 3, "spikes": 1, "min_loss": 1.0, "max_loss_ratio": 2.0}),
    (lambda state_dict: TrainingMonitor(adamw()).load_state_dict(state_dict), {"state_dict": None}),
    (JsonLines, {"path": "monitor.jsonl"}),
    (TensorBoard, {"log_dir": "runs", "prefix": "optimizer/"}),
    (moment_statistics, {"optimizer": adamw(), "backend": None}),
]


@pytest.mark.parametrize(
    ("call", "arguments", "name"),
    [
        pytest.param(call, arguments, name, id=f"{call.__name__}-{name}")
        for call, arguments in CALLS
        for name in arguments
    ],
)
def test_an_argument_is_accepted_or_named(call, arguments, name, tmp_path, monkeypatch):
    if call is TensorBoard:
        pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    check_accepted_or_named(name, lambda value: call(**{**arguments, name: value}))


def test_a_folder_is_no_file_of_records(tmp_path):
    with pytest.raises(ValueError, match="path must be a file, got the folder"):
        JsonLines(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader, writer = os.pipe()  # a path as that of standard output in a pipeline
    try:
        for path in (os.devnull, tmp_path / "pipe", f"/dev/fd/{reader}"):
            with pytest.raises(ValueError, match="path must be a regular file, got"):
                JsonLines(path)
    finally:
        os.close(reader)
        os.close(writer)


def test_counts_of_numpy_are_kept_as_plain_numbers():
    monitor = TrainingMonitor(adamw(), spike_threshold=np.float32(1.5), read_every=np.int64(3))
    counts = {"steps": np.int64(3), "spikes": np.int32(1), "min_loss": np.float32(1.0), "max_loss_ratio": None}
    monitor.load_state_dict(counts)
    assert [type(value) for value in monitor.state_dict().values()] == [int, int, float, type(None)]
