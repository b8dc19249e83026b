"""Sequence-length warmup and a monitor of the optimizer as callbacks of Hugging Face's Trainer."""

from .monitor import Monitor
from .warmup import SequenceLengthWarmup

__all__ = ["Monitor", "SequenceLengthWarmup"]
