"""Forecast of a run with a schedule: its lengths, and the tokens and FLOPs that it saves, as a table and a figure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from ..schedule.milestones import Milestone
from ..schedule.scheduler import SequenceLengthScheduler
from ..utils.figures import FULL_LENGTH, WITH_WARMUP, name_lines, new_figure, plot_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TABLE_ROWS = 12  #: maximum number of stages in the table


@dataclass(frozen=True)
class ModelSize:
    """A decoder with an MLP of four times the hidden size and tied embeddings."""

    layers: int
    hidden_size: int
    vocab_size: int

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
    stages: list[PlannedStage]
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
        return {**asdict(self), "tokens_saved": self.tokens_saved(), "attention_saved": self.attention_saved()}

    def steps_and_tokens(self) -> tuple[list[int], list[int]]:
        """The steps and the tokens before each stage, and at the end."""
        steps = accumulate((stage.steps for stage in self.stages), initial=0)
        return list(steps), list(accumulate((stage.tokens for stage in self.stages), initial=0))

    def table(self) -> str:
        """A sample of the stages, and the tokens and FLOPs that the run saves."""
        (*_, steps), tokens = self.steps_and_tokens()
        last, rows = len(self.stages) - 1, min(len(self.stages), _TABLE_ROWS)
        lines = [f"{self.unit:>14}  {'length':>8}  {'of all tokens so far':>22}"]
        for index in (round(row * last / max(rows - 1, 1)) for row in range(rows)):
            stage, share = self.stages[index], tokens[index] / self.tokens
            lines.append(f"{stage.progress:>14,}  {stage.seq_length:>8,}  {share:>22.1%}")
        model = self.model
        return "\n".join(lines) + (
            f"\n\nmodel      {model.layers} layers, hidden size {model.hidden_size:,}, "
            f"vocabulary {model.vocab_size:,}: {model.parameters() / 1e6:,.1f} M parameters\n"
            f"steps      {steps:,}\n"
            f"tokens     {self.tokens:.4g}, {self.tokens_saved():.1%} fewer than as many steps at full length\n"
            f"training   {self.flops:.4g} FLOPs of this model, {1 - self.flops / self.flops_full_length:.1%} fewer\n"
            f"attention  {self.attention_flops:.4g} of these FLOPs, "
            f"{self.attention_saved():.1%} fewer than for the same tokens at full length"
        )

    def figure(self) -> Figure:
        """Above: the length. Below: tokens so far, or steps if the unit is the token, with and without warmup."""
        from matplotlib.ticker import EngFormatter

        figure = new_figure(8, 5.6)
        lengths, amounts = figure.subplots(2, 1, sharex=True)
        progress, end = [*(stage.progress for stage in self.stages), self.end], [0, self.end]
        longest = self.stages[-1].seq_length
        options = {"marker": "none", "drawstyle": "steps-post"}
        plot_run(lengths, FULL_LENGTH, end, [longest, longest], **options)
        plot_run(lengths, WITH_WARMUP, progress, [*(stage.seq_length for stage in self.stages), longest], **options)
        steps, tokens = self.steps_and_tokens()
        if self.unit == "token":  # as many tokens
            amount, so_far, full = "optimizer steps", steps, steps[-1] * self.tokens / self.tokens_full_length
        else:  # as many steps
            amount, so_far, full = "tokens", tokens, self.tokens_full_length
        plot_run(amounts, FULL_LENGTH, end, [0, full], marker="none")
        plot_run(amounts, WITH_WARMUP, progress, so_far, marker="none")
        lengths.set(ylabel="sequence length (tokens)", ylim=(0, None))
        amounts.set(xlabel=f"{self.unit}s", ylabel=f"{amount} so far", xlim=end, ylim=(0, None))
        for axis in (lengths.yaxis, amounts.xaxis, amounts.yaxis):
            axis.set_major_formatter(EngFormatter())  # 20 k, 5 M
        name_lines(figure)
        return figure


def plan_schedule(scheduler: SequenceLengthScheduler, total: int, batch_size: int, model: ModelSize) -> SchedulePlan:
    """The plan of a run of `total` units, the ramp included, with `batch_size` rows in each step."""
    stages, progress = [], 0
    for milestone, following in pairwise([*scheduler.milestones(), Milestone(total, 0)]):
        tokens = batch_size * milestone.seq_length
        units = {"step": 1, "token": tokens, "sample": batch_size}[scheduler.unit]
        left = min(following.progress, total) - progress
        steps = max(0, -(-left // units))  # the last one may end after the next milestone, or after several
        if steps:
            stages.append(PlannedStage(progress, milestone.seq_length, steps, steps * tokens))
        progress += steps * units
    longest, tokens = scheduler.max_seq_length, sum(stage.tokens for stage in stages)
    full = sum(stage.steps for stage in stages) * batch_size * longest
    return SchedulePlan(
        unit=scheduler.unit,
        model=model,
        stages=stages,
        end=progress,
        tokens=tokens,
        tokens_full_length=full,
        flops=sum(stage.tokens * model.flops_per_token(stage.seq_length) for stage in stages),
        flops_full_length=full * model.flops_per_token(longest),
        attention_flops=sum(stage.tokens * model.attention_flops_per_token(stage.seq_length) for stage in stages),
        attention_flops_same_tokens=tokens * model.attention_flops_per_token(longest),
    )
