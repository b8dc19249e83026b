"""Draws the figures that need no records: what heads visit, the allocator's policy, and a planned schedule."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.cli.schedule_plan import ModelSize, plan_schedule

from .alibi_attention.reach import random_reach, shares_figure, tiles_figure
from .allocator import replay
from .common.figures import save_both
from .common.records import FIGURES

HEADS, LENGTH, LENGTHS = 12, 8192, [2**power for power in range(7, 15)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder for the figures")


def main(arguments: argparse.Namespace) -> None:
    folder = arguments.figures
    reaches = [random_reach(HEADS, length) for length in LENGTHS]
    plan = plan_schedule(SequenceLengthScheduler(8, 1024, duration=3000), 10_000, 32, ModelSize(12, 768, 50257))
    print(save_both(functools.partial(tiles_figure, reaches[LENGTHS.index(LENGTH)]), folder / "reach.png"))
    print(save_both(functools.partial(shares_figure, reaches), folder / "attended_share.png"))
    print(save_both(plan.figure, folder / "plan.png"))
    print(replay.draw(folder))
