"""Callbacks of Hugging Face's Trainer: sequence-length warmup, a monitor of the optimizer, the position in the data."""

try:
    from .loader_state import LoaderState
    from .monitor import Monitor
    from .warmup import SequenceLengthWarmup
except ImportError as error:
    raise ImportError(
        f"transformers and accelerate are needed (pip install seqwarm_kernels[huggingface]); the import failed: {error}"
    ) from error

__all__ = ["LoaderState", "Monitor", "SequenceLengthWarmup"]
