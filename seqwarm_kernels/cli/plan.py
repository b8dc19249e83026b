"""The command `plan`: show the lengths of a schedule, and the tokens and FLOPs that it saves."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..schedule.plan import ModelSize, draw, plan_schedule, table
from ..schedule.scheduler import UNITS, Pacing, SequenceLengthScheduler, linear, root


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--min-seq-length", type=int, default=8)
    parser.add_argument("--max-seq-length", type=int, default=1024)
    parser.add_argument("--step-size", type=int, default=8)
    parser.add_argument("--unit", choices=UNITS, default="step")
    parser.add_argument("--duration", type=int, required=True, help="units until the full length")
    parser.add_argument("--total", type=int, help="units of the whole run; default: duration / 0.3")
    parser.add_argument("--root", type=float, metavar="DEGREE", help="pacing root(DEGREE); default: linear")
    parser.add_argument("--batch-size", type=int, default=32, help="rows in a step")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw the lengths and the tokens to this file")
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
    plan = plan_schedule(scheduler, total, arguments.batch_size, model)
    print(plan.to_json() if arguments.json else table(plan))
    if arguments.figure is not None:
        draw(plan, arguments.figure)
    return 0
