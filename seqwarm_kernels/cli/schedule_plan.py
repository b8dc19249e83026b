"""Forecast of a training run with a schedule: lengths over time, and the tokens and FLOPs that the schedule saves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from ..schedule.milestones import Milestone
from ..schedule.scheduler import SequenceLengthScheduler


@dataclass(frozen=True)
class ModelSize:
    """A decoder with an MLP of four times the hidden size and tied embeddings."""

    layers: int
    hidden_size: int
    vocab_size: int

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, hidden size {self.hidden_size:,}, vocabulary {self.vocab_size:,}: "
            f"{self.parameters() / 1e6:,.1f} M parameters"
        )

    def parameters(self) -> int:
        return 12 * self.layers * self.hidden_size**2 + self.vocab_size * self.hidden_size

    def flops_per_token(self, length: int) -> float:
        """FLOPs to train on one token of a sequence of `length`.

        Source: Chowdhery et al. (arXiv 2204.02311), appendix B, with half of the attention left out, because it is
        causal.
        """
        return 6 * self.parameters() + self.attention_flops_per_token(length)

    def attention_flops_per_token(self, length: int) -> float:
        """FLOPs of the two matrix products with attention scores, forward and backward."""
        return 6 * self.layers * self.hidden_size * length


@dataclass(frozen=True)
class PlannedStage:
    """The part of a run between two changes of length."""

    progress: int  #: units of the schedule before the stage's first step
    seq_length: int
    steps: int
    tokens: int


@dataclass(frozen=True)
class SchedulePlan:
    """A run with warmup, compared with the same number of steps at the full length."""

    unit: str
    model: ModelSize
    stages: tuple[PlannedStage, ...]
    end: int  #: units after the last step
    tokens: int
    tokens_full_length: int
    flops: float
    flops_full_length: float
    attention_flops: float
    attention_flops_same_tokens: float  #: FLOPs of attention for the run's tokens, all in sequences of the full length

    def tokens_saved(self) -> float:
        """The saved share of the tokens of the same number of steps at the full length."""
        return 1 - self.tokens / self.tokens_full_length

    def attention_saved(self) -> float:
        """The saved share of the FLOPs of attention for the same tokens at the full length."""
        return 1 - self.attention_flops / self.attention_flops_same_tokens

    def to_json(self) -> dict[str, Any]:
        saved = {"tokens_saved": self.tokens_saved(), "attention_saved": self.attention_saved()}
        return {**asdict(self), **saved}


def plan_schedule(scheduler: SequenceLengthScheduler, total: int, batch_size: int, model: ModelSize) -> SchedulePlan:
    """The plan of a run of `total` units, the ramp included, with `batch_size` rows in each step."""
    stages, end = _stages(scheduler.milestones(), total, scheduler.unit, batch_size)
    longest = scheduler.max_seq_length
    tokens, steps = sum(stage.tokens for stage in stages), sum(stage.steps for stage in stages)
    full = steps * batch_size * longest
    return SchedulePlan(
        unit=scheduler.unit,
        model=model,
        stages=tuple(stages),
        end=end,
        tokens=tokens,
        tokens_full_length=full,
        flops=sum(stage.tokens * model.flops_per_token(stage.seq_length) for stage in stages),
        flops_full_length=full * model.flops_per_token(longest),
        attention_flops=sum(stage.tokens * model.attention_flops_per_token(stage.seq_length) for stage in stages),
        attention_flops_same_tokens=tokens * model.attention_flops_per_token(longest),
    )


def _stages(milestones: list[Milestone], total: int, unit: str, batch_size: int) -> tuple[list[PlannedStage], int]:
    """The steps up to `total` units, and their end. Each has the length at its start, and may end after the next
    milestone."""
    stages, progress = [], 0
    for milestone, following in pairwise([*milestones, Milestone(total, 0)]):
        tokens = batch_size * milestone.seq_length
        units = {"step": 1, "token": tokens, "sample": batch_size}[unit]
        left = min(following.progress, total) - progress
        steps = max(0, -(-left // units))
        if steps:
            stages.append(PlannedStage(progress, milestone.seq_length, steps, steps * tokens))
        progress += steps * units
    return stages, progress
