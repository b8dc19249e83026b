"""Monitoring of an optimizer's moments, losses and loss spikes."""

from .moments import MomentStatistics, moment_statistics
from .monitor import TrainingMonitor
from .outputs import JsonLines, TensorBoard
from .records import StepRecord

__all__ = ["JsonLines", "MomentStatistics", "StepRecord", "TensorBoard", "TrainingMonitor", "moment_statistics"]
