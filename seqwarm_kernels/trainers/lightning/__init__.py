"""Sequence-length warmup and a monitor of the optimizer as callbacks of Lightning's Trainer."""

from ...utils.checks import needs

with needs("these callbacks need lightning", "seqwarm_kernels[lightning]"):
    from .monitor import Monitor
    from .warmup import SequenceLengthWarmup

__all__ = ["Monitor", "SequenceLengthWarmup"]
