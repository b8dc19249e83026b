"""Forecast of a training run with a schedule: lengths over time, and the tokens and FLOPs that the schedule saves."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.checks import check_int, check_matplotlib
from ..utils.figures import label_lines, new_figure, plot, png, short_numbers
from .scheduler import Milestone, SequenceLengthScheduler

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Maximum number of stages in the table.
_TABLE_ROWS = 12

_FULL, _WARMUP = "full length throughout", "sequence-length warmup"  #: names of the lines in the figure


@dataclass(frozen=True)
class ModelSize:
    """A decoder with an MLP of four times the hidden size and tied embeddings."""

    layers: int
    hidden_size: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("layers", "hidden_size", "vocab_size"):
            check_int(name, getattr(self, name), minimum=1)

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

    progress: int  #: units of the schedule at the start of the stage
    seq_length: int
    steps: float
    tokens: float


@dataclass(frozen=True)
class SchedulePlan:
    """A run with warmup, compared with the same number of steps at the full length."""

    unit: str
    model: ModelSize
    stages: tuple[PlannedStage, ...]
    tokens: float
    tokens_full_length: float
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
    if total < 1:
        raise ValueError(f"total must be at least 1 {scheduler.unit}, got {total}")
    check_int("batch_size", batch_size, minimum=1)
    changes = [milestone for milestone in scheduler.milestones() if milestone.progress < total]
    ends = [*changes[1:], Milestone(total, 0)]
    stages = [_stage(start, end.progress, scheduler.unit, batch_size) for start, end in zip(changes, ends, strict=True)]
    longest = scheduler.max_seq_length
    tokens, steps = sum(stage.tokens for stage in stages), sum(stage.steps for stage in stages)
    full = steps * batch_size * longest
    return SchedulePlan(
        unit=scheduler.unit,
        model=model,
        stages=tuple(stages),
        tokens=tokens,
        tokens_full_length=full,
        flops=sum(stage.tokens * model.flops_per_token(stage.seq_length) for stage in stages),
        flops_full_length=full * model.flops_per_token(longest),
        attention_flops=sum(stage.tokens * model.attention_flops_per_token(stage.seq_length) for stage in stages),
        attention_flops_same_tokens=tokens * model.attention_flops_per_token(longest),
    )


def _stage(start: Milestone, end: int, unit: str, batch_size: int) -> PlannedStage:
    units, tokens_per_step = end - start.progress, batch_size * start.seq_length
    steps = {"step": units, "token": units / tokens_per_step, "sample": units / batch_size}[unit]
    return PlannedStage(start.progress, start.seq_length, steps, steps * tokens_per_step)


def table(plan: SchedulePlan) -> str:
    """A sample of the stages, and the tokens and FLOPs that the run saves."""
    shown = plan.stages
    if len(shown) > _TABLE_ROWS:
        shown = tuple(shown[round(index * (len(shown) - 1) / (_TABLE_ROWS - 1))] for index in range(_TABLE_ROWS))
    lines = [f"{plan.unit:>14}  {'length':>8}  {'of all tokens so far':>22}"]
    before = {stage.progress: sum(s.tokens for s in plan.stages if s.progress < stage.progress) for stage in shown}
    lines += [
        f"{stage.progress:>14,}  {stage.seq_length:>8,}  {before[stage.progress] / plan.tokens:>22.1%}"
        for stage in shown
    ]
    steps = sum(stage.steps for stage in plan.stages)
    lines += [
        "",
        f"model      {plan.model}",
        f"steps      {math.ceil(steps):,}",
        f"tokens     {plan.tokens:.4g}, {plan.tokens_saved():.1%} fewer than as many steps at full length",
        f"training   {plan.flops:.4g} FLOPs of this model, {1 - plan.flops / plan.flops_full_length:.1%} fewer",
        f"attention  {plan.attention_flops:.4g} of these FLOPs, "
        f"{plan.attention_saved():.1%} fewer than for the same tokens at full length",
    ]
    return "\n".join(lines)


def draw(plan: SchedulePlan, path: Path) -> None:
    """Draw the length and the tokens so far over the run, as a PNG.

    Raises:
        ImportError: matplotlib is not installed. The message says how to install it.
    """
    check_matplotlib()
    path.write_bytes(png(functools.partial(plan_figure, plan)))


def plan_figure(plan: SchedulePlan) -> Figure:
    """Above: the length. Below: tokens so far, or steps if the unit is the token, with and without warmup."""
    figure = new_figure(8, 5.6)
    lengths, amounts = figure.subplots(2, 1, sharex=True)
    end = plan.stages[-1].progress + _units_of(plan.stages[-1], plan.unit)
    progress = [*(stage.progress for stage in plan.stages), end]
    longest = plan.stages[-1].seq_length
    options = {"marker": "none", "drawstyle": "steps-post"}
    plot(lengths, _FULL, [0, end], [longest, longest], **options)
    plot(lengths, _WARMUP, progress, [*(stage.seq_length for stage in plan.stages), longest], **options)
    steps = list(itertools.accumulate((stage.steps for stage in plan.stages), initial=0.0))
    tokens = list(itertools.accumulate((stage.tokens for stage in plan.stages), initial=0.0))
    if plan.unit == "token":  # as many tokens
        so_far, full, amount = steps, steps[-1] * plan.tokens / plan.tokens_full_length, "optimizer steps"
    else:  # as many steps
        so_far, full, amount = tokens, plan.tokens_full_length, "tokens"
    plot(amounts, _FULL, [0, end], [0, full], marker="none")
    plot(amounts, _WARMUP, progress, so_far, marker="none")
    lengths.set(ylabel="sequence length (tokens)", ylim=(0, None))
    amounts.set(xlabel=f"{plan.unit}s", ylabel=f"{amount} so far", xlim=(0, end), ylim=(0, None))
    for axis in (lengths.yaxis, amounts.xaxis, amounts.yaxis):
        short_numbers(axis)
    label_lines([lengths, amounts], bold=_WARMUP)
    return figure


def _units_of(stage: PlannedStage, unit: str) -> float:
    if unit == "sample":
        return stage.tokens / stage.seq_length
    return stage.steps if unit == "step" else stage.tokens
