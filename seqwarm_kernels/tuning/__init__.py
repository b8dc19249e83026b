"""Tuning: the minimum length and the duration of a schedule, found in short trials."""

from .result import NoStableSchedule, TunedSchedule
from .trial import RunTrial, Trial, Validation
from .tune_schedule import tune_schedule

__all__ = ["NoStableSchedule", "RunTrial", "Trial", "TunedSchedule", "Validation", "tune_schedule"]
