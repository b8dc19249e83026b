"""The cost of TrainingMonitor on a GPU, compared with a training step of a GPT with 50 million parameters."""

from __future__ import annotations

import functools

import torch

from seqwarm_kernels.diagnostics import TrainingMonitor, moment_statistics

from ..common.timing import Call
from ..gpu.records import Recorder
from .trainings import Training, exact_statistics, read_by_hand

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
        found = [value.item() for value in moment_statistics(training.optimizer) if value is not None]
        pairs = zip(found, exact_statistics(training.optimizer), strict=True)
        figures = {
            "parameters": float(training.parameters),
            "error": max(abs(value - wanted) / wanted for value, wanted in pairs),
        }
        return call, figures

    for reading in (STEP, MONITORED, BY_HAND):
        measured = functools.partial(make, reading)
        for inputs in "ab":  # measured twice, because the difference is small
            recorder.measure("diagnostics", "GPT, AdamW, bfloat16", "training", reading, measured, inputs=inputs)
