"""Sequence-length warmup and a monitor of the optimizer as callbacks of Hugging Face's Trainer."""

try:
    from .monitor import Monitor
    from .warmup import SequenceLengthWarmup
except ImportError as error:
    raise ImportError(
        f"transformers and accelerate are needed (pip install seqwarm_kernels[huggingface]); the import failed: {error}"
    ) from error

__all__ = ["Monitor", "SequenceLengthWarmup"]
