"""The cost of TrainingMonitor on a GPU, compared with a training step of a GPT with 50 million parameters."""

from __future__ import annotations

import functools

import torch

from seqwarm_kernels.diagnostics import TrainingMonitor

from ..common.timing import Call
from ..gpu.records import Recorder
from .trainings import Training, read_by_hand, read_fused, relative_error

STEP, MONITORED, BY_HAND = "step", "step, TrainingMonitor", "step, .item() of each tensor"


def monitor(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    make_training = functools.cache(lambda: Training(*((2, 2, 16, 2, 16) if tiny else (16, 8, 512, 32, 1024)), device))

    def make(reading: str) -> tuple[Call, dict[str, float]]:
        training = make_training()
        watched = TrainingMonitor(training.optimizer, lambda record: None)

        def call() -> None:
            loss, norm = training.step()
            if reading == MONITORED:
                watched.observe(loss, norm)
            elif reading == BY_HAND:
                read_by_hand(training.optimizer)

        call()
        error = relative_error(training.optimizer, read_fused(training.optimizer))
        return call, {"parameters": float(training.parameters), "error": error}

    for reading in (STEP, MONITORED, BY_HAND):
        measured = functools.partial(make, reading)
        for inputs in "ab":  # measured twice, because the difference is small
            recorder.measure("diagnostics", "GPT, AdamW, bfloat16", "training", reading, measured, inputs=inputs)
