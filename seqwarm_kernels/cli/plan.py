"""The command `plan`: the lengths of a schedule, the tokens and FLOPs that it saves, and what ranks would exchange."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..utils.progress import standard_error
from .common import Result, add_figure, add_pacing, count, pacing, usage_errors

if TYPE_CHECKING:
    from .exchanges import Exchanges

HELP = "show the lengths of a schedule, and the tokens and FLOPs that it saves"
EXAMPLES = """\
FLOPs are those of a GPT with an MLP of four times the hidden size and tied
embeddings. The default sizes are those of GPT-2 small.

examples:
  seqwarm plan --duration 3000
  seqwarm plan --duration 60000000 --unit token --figure plan.png
  seqwarm plan --duration 3000 --max-seq-length 131072 --batch-size 1 --ranks 4
"""

#: The duration's share of a run whose total is not given: that of Composer's sequence-length warmup.
_DEFAULT_SHARE = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    schedule = parser.add_argument_group("the schedule")
    add = schedule.add_argument
    add("--duration", type=int, required=True, metavar="UNITS", help="units until the full length; required")
    total_help = f"units of the whole run, the ramp included (default: duration / {_DEFAULT_SHARE})"
    add("--total", type=count, metavar="UNITS", help=total_help)
    add("--unit", default="step", help="what is counted: step, token or sample")
    add("--min-seq-length", type=int, default=8, metavar="TOKENS", help="length at the start")
    add("--max-seq-length", type=int, default=1024, metavar="TOKENS", help="full length")
    add_pacing(schedule)
    add("--batch-size", type=count, default=32, metavar="ROWS", help="rows in a step")
    add = parser.add_argument_group("the model, for FLOPs").add_argument
    add("--layers", type=count, default=12, metavar="N", help="number of layers")
    hidden_help = "width of the model (default: --heads * --head-dim if the latter is given, else 768)"
    add("--hidden-size", type=count, metavar="N", help=hidden_help)
    add("--vocab-size", type=count, default=50257, metavar="N", help="size of the vocabulary")
    add = parser.add_argument_group("rows whose tokens are sharded over ranks").add_argument
    add("--ranks", type=count, metavar="N", help="show what N ranks exchange at the full length (default: no table)")
    add("--heads", type=count, default=12, metavar="N", help="heads of a layer, with the usual slopes of ALiBi")
    add("--key-heads", type=count, metavar="N", help="heads of keys and values (default: as many as --heads)")
    add("--head-dim", type=count, metavar="N", help="size of a head (default: --hidden-size / --heads)")
    score_help = "standard deviation of the scores before the bias, which decides the halo; larger scores reach farther"
    add("--score-std", type=float, default=1.0, metavar="STD", help=score_help)
    add_figure(parser, "the lengths and the tokens")


def run(arguments: argparse.Namespace) -> Result:
    with usage_errors():
        from ..schedule.scheduler import SequenceLengthScheduler
        from ..utils.figures import write_figure
        from .schedule_plan import ModelSize, plan_schedule

        scheduler = SequenceLengthScheduler(
            arguments.min_seq_length,
            arguments.max_seq_length,
            duration=arguments.duration,
            step_size=arguments.step_size,
            unit=arguments.unit,
            pacing=pacing(arguments.root),
        )
        total = arguments.total or max(round(arguments.duration / _DEFAULT_SHARE), 1)
        if arguments.hidden_size is None:
            arguments.hidden_size = arguments.heads * arguments.head_dim if arguments.head_dim else 768
        model = ModelSize(arguments.layers, arguments.hidden_size, arguments.vocab_size)
        plan = plan_schedule(scheduler, total, arguments.batch_size, model)
        exchanges = None if arguments.ranks is None else _exchanges(arguments)
    if total < arguments.duration:
        print(
            f"seqwarm plan: warning: the run of {total:,} {scheduler.unit}s ends before the full length, which "
            f"--duration sets to {arguments.duration:,} {scheduler.unit}s",
            file=standard_error(),
        )
    if arguments.figure is not None:
        write_figure(plan.figure, arguments.figure)
    if exchanges is None:
        return Result(plan.to_json(), plan.table())
    return Result({**plan.to_json(), "exchanges": exchanges.to_json()}, f"{plan.table()}\n\n{exchanges.table()}")


def _exchanges(arguments: argparse.Namespace) -> Exchanges:
    """What the ranks exchange for a batch of the full length."""
    from .exchanges import ContextSize, Exchanges, normal_widths

    heads, hidden_size = arguments.heads, arguments.hidden_size
    if arguments.head_dim is None and hidden_size % heads:
        raise ValueError(f"--heads must divide --hidden-size {hidden_size} without --head-dim, got {heads}")
    size = ContextSize(
        heads,
        arguments.key_heads or heads,
        arguments.head_dim or hidden_size // heads,
        arguments.max_seq_length,
        arguments.ranks,
        arguments.batch_size,
    )
    return Exchanges(size, normal_widths(size, score_std=arguments.score_std))
