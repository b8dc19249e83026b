"""Sequence-length warmup and ALiBi attention for PyTorch.

`SequenceLengthScheduler` gives the current length, `resize_batch` makes a batch that long, `alibi_attention` attends,
and `warmup_allocator` claims the memory of the longest batch before training starts. The modules `data`, `diagnostics`
and `trainers` are imported on first access.
"""

import importlib
from types import ModuleType

from .allocator.compilation import compilations, no_compilation
from .allocator.report import AllocatorReport
from .allocator.warmup import warmup_allocator
from .attention.attended_share import attended_share, attended_share_varlen
from .attention.functional import alibi_attention, alibi_attention_varlen
from .attention.slopes import alibi_bias, alibi_slopes
from .models import SurgeryReport, apply_alibi, load_alibi_model, register_alibi
from .resizing.buffers import BatchBuffers
from .resizing.functional import ResizeInfo, resize_batch
from .schedule.scheduler import Milestone, SequenceLengthScheduler, discrete, root

__version__ = "0.1.0"

_LAZY_MODULES = ("data", "diagnostics", "trainers")

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


def __getattr__(name: str) -> ModuleType:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY_MODULES])
