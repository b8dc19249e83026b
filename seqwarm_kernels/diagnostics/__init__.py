"""Monitoring of an optimizer's moments, losses and loss spikes, and tuning of a schedule in short trials."""

from ..tuning import NoStableSchedule, RunTrial, Trial, TunedSchedule, Validation, tune_schedule
from .moments import MomentStatistics, moment_statistics
from .monitor import TrainingMonitor
from .outputs import JsonLines, TensorBoard
from .records import StepRecord

__all__ = [
    "JsonLines",
    "MomentStatistics",
    "NoStableSchedule",
    "RunTrial",
    "StepRecord",
    "TensorBoard",
    "TrainingMonitor",
    "Trial",
    "TunedSchedule",
    "Validation",
    "moment_statistics",
    "tune_schedule",
]
