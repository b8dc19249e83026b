"""What a schedule does to a training run before it starts: lengths over time, tokens and attention's work saved."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from ..utils.checks import check_matplotlib
from .scheduler import UNITS, Milestone, Pacing, SequenceLengthScheduler, linear, root


@dataclass(frozen=True)
class ModelSize:
    """A decoder with the usual MLP of four times the hidden size and tied embeddings."""

    layers: int
    hidden_size: int
    vocab_size: int

    def parameters(self) -> int:
        return 12 * self.layers * self.hidden_size**2 + self.vocab_size * self.hidden_size

    def flops_of_token(self, length: int) -> float:
        """Of one trained token in a sequence of `length`: Chowdhery et al. (arXiv 2204.02311), appendix B, with half
        of the attention left out, since it is causal."""
        return 6 * self.parameters() + self.attention_flops_of_token(length)

    def attention_flops_of_token(self, length: int) -> float:
        """Of the two products with scores, forward and backward."""
        return 6 * self.layers * self.hidden_size * length


@dataclass(frozen=True)
class Stage:
    """Between two changes of length."""

    progress: int  #: units of the schedule, when it begins
    seq_length: int
    steps: float
    tokens: float


@dataclass(frozen=True)
class Plan:
    """Of as many steps as the run has, with warmup and at the full length throughout."""

    unit: str
    stages: tuple[Stage, ...]
    tokens: float
    tokens_full_length: float
    flops: float
    flops_full_length: float
    attention_flops: float
    attention_flops_same_tokens: float  #: of the run's tokens, all in sequences of the full length

    def tokens_saved(self) -> float:
        """The share of the tokens that as many steps at the full length take."""
        return 1 - self.tokens / self.tokens_full_length

    def attention_saved(self) -> float:
        """The share of attention's work that these tokens would be at the full length."""
        return 1 - self.attention_flops / self.attention_flops_same_tokens

    def to_json(self) -> str:
        saved = {"tokens_saved": self.tokens_saved(), "attention_saved": self.attention_saved()}
        return json.dumps({**asdict(self), **saved}, indent=2)


def make_plan(scheduler: SequenceLengthScheduler, total: int, batch_size: int, model: ModelSize) -> Plan:
    """Of a run of `total` units, the ramp included, with `batch_size` rows in each step."""
    if total < 1:
        raise ValueError(f"total must be at least 1 {scheduler.unit}, got {total}")
    changes = [milestone for milestone in scheduler.milestones() if milestone.progress < total]
    ends = [*changes[1:], Milestone(total, 0)]
    stages = [_stage(start, end.progress, scheduler.unit, batch_size) for start, end in zip(changes, ends, strict=True)]
    longest = scheduler.max_seq_length
    tokens, steps = sum(stage.tokens for stage in stages), sum(stage.steps for stage in stages)
    full = steps * batch_size * longest
    return Plan(
        unit=scheduler.unit,
        stages=tuple(stages),
        tokens=tokens,
        tokens_full_length=full,
        flops=sum(stage.tokens * model.flops_of_token(stage.seq_length) for stage in stages),
        flops_full_length=full * model.flops_of_token(longest),
        attention_flops=sum(stage.tokens * model.attention_flops_of_token(stage.seq_length) for stage in stages),
        attention_flops_same_tokens=tokens * model.attention_flops_of_token(longest),
    )


def _stage(start: Milestone, end: int, unit: str, batch_size: int) -> Stage:
    units, tokens_of_step = end - start.progress, batch_size * start.seq_length
    steps = {"step": units, "token": units / tokens_of_step, "sample": units / batch_size}[unit]
    return Stage(start.progress, start.seq_length, steps, steps * tokens_of_step)


def table(plan: Plan, most_rows: int = 12) -> str:
    """The stages, thinned out where there are many, and what the run saves."""
    shown = plan.stages
    if len(shown) > most_rows:
        shown = tuple(shown[round(index * (len(shown) - 1) / (most_rows - 1))] for index in range(most_rows))
    lines = [f"{plan.unit:>14}  {'length':>8}  {'of all tokens so far':>22}"]
    before = {stage.progress: sum(s.tokens for s in plan.stages if s.progress < stage.progress) for stage in shown}
    lines += [
        f"{stage.progress:>14,}  {stage.seq_length:>8,}  {before[stage.progress] / plan.tokens:>22.1%}"
        for stage in shown
    ]
    steps = sum(stage.steps for stage in plan.stages)
    lines += [
        "",
        f"steps                        {math.ceil(steps):,}",
        f"tokens                       {plan.tokens:.4g} "
        f"({plan.tokens_saved():.1%} fewer than as many steps at full length)",
        f"training                     {plan.flops:.4g} FLOPs ({1 - plan.flops / plan.flops_full_length:.1%} fewer)",
        f"attention                    {plan.attention_flops:.4g} FLOPs "
        f"({plan.attention_saved():.1%} fewer than these tokens at full length)",
    ]
    return "\n".join(lines)


def draw(plan: Plan, path: Path) -> None:
    """The length over the run, and the tokens so far.

    Raises:
        ImportError: matplotlib is missing; says how to install it.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    end = plan.stages[-1].progress + _units_of(plan.stages[-1], plan.unit)
    progress = [*(stage.progress for stage in plan.stages), end]
    lengths = [stage.seq_length for stage in plan.stages]
    axes.step(progress, [*lengths, lengths[-1]], where="post", color="#D55E00", label="sequence length")
    axes.set(xlabel=f"{plan.unit}s", ylabel="sequence length", xlim=(0, end), ylim=(0, None))
    tokens = [0.0]
    for stage in plan.stages:
        tokens.append(tokens[-1] + stage.tokens)
    beside = axes.twinx()
    beside.plot(progress, tokens, color="#0072B2", label="tokens so far")
    beside.set(ylabel="tokens so far", ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=130)


def _units_of(stage: Stage, unit: str) -> float:
    if unit == "sample":
        return stage.tokens / stage.seq_length
    return stage.steps if unit == "step" else stage.tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--min-seq-length", type=int, default=8)
    parser.add_argument("--max-seq-length", type=int, default=1024)
    parser.add_argument("--step-size", type=int, default=8)
    parser.add_argument("--unit", choices=UNITS, default="step")
    parser.add_argument("--duration", type=int, required=True, help="units until the full length")
    parser.add_argument("--total", type=int, help="units of the whole run; default: duration / 0.3")
    parser.add_argument("--root", type=float, metavar="DEGREE", help="pacing root(DEGREE); default: linear")
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a step")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw the lengths and the tokens here")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(arguments: argparse.Namespace) -> int:
    pacing: Pacing = linear if arguments.root is None else root(arguments.root)
    scheduler = SequenceLengthScheduler(
        arguments.min_seq_length,
        arguments.max_seq_length,
        duration=arguments.duration,
        step_size=arguments.step_size,
        unit=arguments.unit,
        pacing=pacing,
    )
    total = round(arguments.duration / 0.3) if arguments.total is None else arguments.total
    model = ModelSize(arguments.layers, arguments.hidden_size, arguments.vocab_size)
    plan = make_plan(scheduler, total, arguments.batch_size, model)
    print(plan.to_json() if arguments.json else table(plan))
    if arguments.figure is not None:
        draw(plan, arguments.figure)
    return 0
