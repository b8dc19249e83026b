"""Sequence-length warmup and a monitor of the optimizer as callbacks of Lightning's Trainer."""

try:
    from .monitor import Monitor
    from .warmup import SequenceLengthWarmup
except ImportError as error:
    raise ImportError(
        f"lightning is needed (pip install seqwarm_kernels[lightning]); the import failed: {error}"
    ) from error

__all__ = ["Monitor", "SequenceLengthWarmup"]
