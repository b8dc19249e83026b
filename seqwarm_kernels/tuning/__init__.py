"""How short sequences begin, and for how long they grow: found in short trials."""

from .configuration import Configuration
from .result import NoStableSchedule, TunedSchedule
from .trial import RunTrial, Trial
from .tune_schedule import tune_schedule
from .validation import Validation

__all__ = ["Configuration", "NoStableSchedule", "RunTrial", "Trial", "TunedSchedule", "Validation", "tune_schedule"]
