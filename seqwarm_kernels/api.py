"""The public names of the package, which `seqwarm_kernels` loads on first access."""

from .allocator.compilation import compilations, no_compilation
from .allocator.report import AllocatorReport
from .allocator.warmup import warmup_allocator
from .attention.attended_share import attended_share, attended_share_varlen
from .attention.functional import alibi_attention, alibi_attention_varlen
from .attention.slopes import alibi_bias, alibi_slopes
from .models import SurgeryReport, apply_alibi, load_alibi_model, register_alibi
from .resizing.buffers import BatchBuffers
from .resizing.functional import ResizeInfo, resize_batch
from .schedule.milestones import Milestone
from .schedule.pacing import cyclic, discrete, doubling, exponential, grow_p2, root
from .schedule.scheduler import SequenceLengthScheduler
from .schedule.token_lr import StepByTokens, TokenLR

__all__ = [
    "AllocatorReport",
    "BatchBuffers",
    "Milestone",
    "ResizeInfo",
    "SequenceLengthScheduler",
    "StepByTokens",
    "SurgeryReport",
    "TokenLR",
    "alibi_attention",
    "alibi_attention_varlen",
    "alibi_bias",
    "alibi_slopes",
    "apply_alibi",
    "attended_share",
    "attended_share_varlen",
    "compilations",
    "cyclic",
    "discrete",
    "doubling",
    "exponential",
    "grow_p2",
    "load_alibi_model",
    "no_compilation",
    "register_alibi",
    "resize_batch",
    "root",
    "warmup_allocator",
]
