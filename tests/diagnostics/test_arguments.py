"""Each argument of the diagnostics replaced by values that make no sense: accepted, or refused by its name."""

import os

import numpy as np
import pytest
import torch

from seqwarm_kernels.diagnostics import JsonLines, TrainingMonitor, moment_statistics

from ..support.arguments import check_accepted_or_named


def adamw():
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])


def load(steps, spikes, min_loss, max_loss_ratio):
    TrainingMonitor(adamw()).load_state_dict(
        {"steps": steps, "spikes": spikes, "min_loss": min_loss, "max_loss_ratio": max_loss_ratio}
    )


CALLS = [
    (TrainingMonitor, {"optimizer": adamw()}),
    (load, {"steps": 3, "spikes": 1, "min_loss": 1.0, "max_loss_ratio": 2.0}),
    (lambda state_dict: TrainingMonitor(adamw()).load_state_dict(state_dict), {"state_dict": None}),
    (JsonLines, {"path": "monitor.jsonl"}),
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
    monkeypatch.chdir(tmp_path)
    check_accepted_or_named(name, lambda value: call(**{**arguments, name: value}))


def test_a_folder_is_refused_and_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader, writer = os.pipe()  # a path as that of standard output in a pipeline
    try:
        for path in (tmp_path, os.devnull, tmp_path / "pipe", f"/dev/fd/{reader}"):
            with pytest.raises(ValueError, match="path"):
                JsonLines(path)
    finally:
        os.close(reader)
        os.close(writer)


def test_counts_of_numpy_are_kept_as_plain_numbers():
    monitor = TrainingMonitor(adamw(), spike_threshold=np.float32(1.5))
    counts = {"steps": np.int64(3), "spikes": np.int32(1), "min_loss": np.float32(1.0), "max_loss_ratio": None}
    monitor.load_state_dict(counts)
    assert [type(value) for value in monitor.state_dict().values()] == [int, int, float, type(None)]
