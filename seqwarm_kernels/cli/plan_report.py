"""What `seqwarm plan` shows of a plan: a table, and a figure of lengths and tokens."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ..utils.figures import FULL_LENGTH, WITH_WARMUP, name_lines, new_figure, plot_run
from .schedule_plan import SchedulePlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TABLE_ROWS = 12  #: maximum number of stages in the table


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
        f"steps      {steps:,}",
        f"tokens     {plan.tokens:.4g}, {plan.tokens_saved():.1%} fewer than as many steps at full length",
        f"training   {plan.flops:.4g} FLOPs of this model, {1 - plan.flops / plan.flops_full_length:.1%} fewer",
        f"attention  {plan.attention_flops:.4g} of these FLOPs, "
        f"{plan.attention_saved():.1%} fewer than for the same tokens at full length",
    ]
    return "\n".join(lines)


def plan_figure(plan: SchedulePlan) -> Figure:
    """Above: the length. Below: tokens so far, or steps if the unit is the token, with and without warmup."""
    from matplotlib.ticker import EngFormatter

    figure = new_figure(8, 5.6)
    lengths, amounts = figure.subplots(2, 1, sharex=True)
    end, progress = plan.end, [*(stage.progress for stage in plan.stages), plan.end]
    longest = plan.stages[-1].seq_length
    options = {"marker": "none", "drawstyle": "steps-post"}
    plot_run(lengths, FULL_LENGTH, [0, end], [longest, longest], **options)
    plot_run(lengths, WITH_WARMUP, progress, [*(stage.seq_length for stage in plan.stages), longest], **options)
    steps = list(itertools.accumulate((stage.steps for stage in plan.stages), initial=0))
    tokens = list(itertools.accumulate((stage.tokens for stage in plan.stages), initial=0))
    if plan.unit == "token":  # as many tokens
        so_far, full, amount = steps, steps[-1] * plan.tokens / plan.tokens_full_length, "optimizer steps"
    else:  # as many steps
        so_far, full, amount = tokens, plan.tokens_full_length, "tokens"
    plot_run(amounts, FULL_LENGTH, [0, end], [0, full], marker="none")
    plot_run(amounts, WITH_WARMUP, progress, so_far, marker="none")
    lengths.set(ylabel="sequence length (tokens)", ylim=(0, None))
    amounts.set(xlabel=f"{plan.unit}s", ylabel=f"{amount} so far", xlim=(0, end), ylim=(0, None))
    for axis in (lengths.yaxis, amounts.xaxis, amounts.yaxis):
        axis.set_major_formatter(EngFormatter())  # 20 k, 5 M
    name_lines(figure)
    return figure
