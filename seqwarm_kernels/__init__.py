"""Sequence-length warmup and ALiBi attention for PyTorch: when, what, compute, memory."""

from .allocator import warmup_allocator
from .allocator_report import AllocatorReport
from .attention import alibi_attention, alibi_attention_varlen
from .batch import ResizeInfo, resize_batch
from .buffers import BatchBuffers
from .compilation import compilations, no_compilation
from .models import SurgeryReport, apply_alibi, load_alibi_model, register_alibi
from .reach import attended_share, attended_share_varlen
from .schedule import Milestone, SequenceLengthScheduler, discrete, root
from .slopes import alibi_bias, alibi_slopes

__version__ = "0.1.0"

__all__ = [
    "AllocatorReport",
    "BatchBuffers",
    "Milestone",
    "ResizeInfo",
    "SequenceLengthScheduler",
    "SurgeryReport",
    "alibi_attention",
    "alibi_attention_varlen",
    "alibi_bias",
    "alibi_slopes",
    "apply_alibi",
    "attended_share",
    "attended_share_varlen",
    "compilations",
    "discrete",
    "load_alibi_model",
    "no_compilation",
    "register_alibi",
    "resize_batch",
    "root",
    "warmup_allocator",
]
