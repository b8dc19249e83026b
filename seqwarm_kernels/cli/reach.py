"""The command `reach`: which share of the keys each head visits, and which tiles."""

from __future__ import annotations

import argparse

from .common import CommandError, Result, add_figure, count, usage_errors

HELP = "show which share of the keys each head of ALiBi attention visits"
EXAMPLES = """\
Runs the kernels on random normal queries and keys. A trained model's scores
may be larger or smaller: --score-std scales them, and
seqwarm_kernels.attended_share measures your own tensors.

examples:
  seqwarm reach --heads 12 --length 8192 --figure reach.png
  seqwarm reach --heads 32 --length 4096 --bidirectional --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--heads", type=count, default=12, metavar="N", help="heads of a layer, with the usual slopes of ALiBi")
    add("--length", type=count, default=8192, metavar="TOKENS", help="sequence length")
    add("--head-dim", type=count, default=64, metavar="N", help="size of a head, 1 to 256")
    add("--bidirectional", action="store_true", help="also attend later keys, as in an encoder (default: causal)")
    add("--window", type=int, metavar="TOKENS", help="largest distance attended (default: no limit)")
    tolerance_help = "share of a query's softmax sum that may be left out; 0 skips nothing (default: 2^-24, 6e-8)"
    add("--skip-tolerance", type=float, default=2**-24, metavar="SHARE", help=tolerance_help)
    score_help = "standard deviation of the scores before the bias; larger scores reach farther"
    add("--score-std", type=float, default=1.0, metavar="STD", help=score_help)
    add("--seed", type=int, default=0, metavar="N", help="seed of the queries and keys")
    add_figure(parser, "the tiles that each head visits")


def run(arguments: argparse.Namespace) -> Result:
    with usage_errors():
        from ..attention.reach import ReachSettings, measure_reach

        names = ("heads", "length", "head_dim", "window", "skip_tolerance", "score_std", "seed")
        settings = ReachSettings(
            **{name: getattr(arguments, name) for name in names}, causal=not arguments.bidirectional
        )
        try:
            reach = measure_reach(settings)
        except RuntimeError as error:
            raise CommandError(str(error)) from error
    if arguments.figure is not None:
        from ..utils.figures import write_figure
        from .reach_figure import reach_figure

        write_figure(lambda: reach_figure(reach), arguments.figure)
    return Result(reach.to_json(), reach.table())
