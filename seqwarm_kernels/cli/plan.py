"""The command `plan`: the lengths of a schedule, and the tokens and FLOPs that it saves."""

from __future__ import annotations

import argparse
import sys

from .common import UNITS, Result, add_figure, add_pacing, check_figure, pacing, usage_errors

HELP = "show the lengths of a schedule, and the tokens and FLOPs that it saves"
EXAMPLES = """\
FLOPs are those of a GPT with an MLP of four times the hidden size and tied
embeddings. The default sizes are those of GPT-2 small.

examples:
  seqwarm plan --duration 3000
  seqwarm plan --duration 60000000 --unit token --figure plan.png
  seqwarm plan --duration 3000 --layers 24 --hidden-size 1024 --json
"""

#: The duration's share of a run whose total is not given: that of Composer's sequence-length warmup.
_DEFAULT_SHARE = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    schedule = parser.add_argument_group("the schedule")
    add = schedule.add_argument
    add("--duration", type=int, required=True, metavar="UNITS", help="units until the full length; required")
    total_help = f"units of the whole run, the ramp included (default: duration / {_DEFAULT_SHARE})"
    add("--total", type=int, metavar="UNITS", help=total_help)
    add("--unit", choices=UNITS, default="step", help="what is counted")
    add("--min-seq-length", type=int, default=8, metavar="TOKENS", help="length at the start")
    add("--max-seq-length", type=int, default=1024, metavar="TOKENS", help="full length")
    add_pacing(schedule)
    add("--batch-size", type=int, default=32, metavar="ROWS", help="rows in a step")
    add = parser.add_argument_group("the model, for FLOPs").add_argument
    add("--layers", type=int, default=12, metavar="N", help="number of layers")
    add("--hidden-size", type=int, default=768, metavar="N", help="width of the model")
    add("--vocab-size", type=int, default=50257, metavar="N", help="size of the vocabulary")
    add_figure(parser, "the lengths and the tokens")


def run(arguments: argparse.Namespace) -> Result:
    with usage_errors(arguments):
        check_figure(arguments.figure)
        from ..schedule.plan import ModelSize, draw, plan_schedule, table
        from ..schedule.scheduler import SequenceLengthScheduler

        scheduler = SequenceLengthScheduler(
            arguments.min_seq_length,
            arguments.max_seq_length,
            duration=arguments.duration,
            step_size=arguments.step_size,
            unit=arguments.unit,
            pacing=pacing(arguments.root),
        )
        total = round(arguments.duration / _DEFAULT_SHARE) if arguments.total is None else arguments.total
        model = ModelSize(arguments.layers, arguments.hidden_size, arguments.vocab_size)
        plan = plan_schedule(scheduler, total, arguments.batch_size, model)
    if total < arguments.duration:
        print(
            f"seqwarm plan: warning: the run of {total:,} {scheduler.unit}s ends before the full length, which "
            f"--duration sets to {arguments.duration:,} {scheduler.unit}s",
            file=sys.stderr,
        )
    if arguments.figure is not None:
        draw(plan, arguments.figure)
    return Result(plan.to_json(), table(plan))
