"""What goes on in training: monitors of an optimizer's moments, losses and spikes."""

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
