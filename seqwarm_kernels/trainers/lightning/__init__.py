"""Callbacks of Lightning's Trainer: sequence-length warmup, a monitor of the optimizer, the position in the data."""

from ...utils.checks import needs

with needs("these callbacks need lightning", "seqwarm_kernels[lightning]"):
    from .loader_state import LoaderState
    from .monitor import Monitor
    from .warmup import SequenceLengthWarmup

__all__ = ["LoaderState", "Monitor", "SequenceLengthWarmup"]
