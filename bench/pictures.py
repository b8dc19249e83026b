"""Draws the figures that need no records: what heads visit, the allocator's policy, and a planned schedule."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.attention.reach import ReachSettings, measure_reach
from seqwarm_kernels.attention.reach_figures import reach_figure, share_figure
from seqwarm_kernels.cli.plan_report import plan_figure
from seqwarm_kernels.cli.schedule_plan import ModelSize, plan_schedule
from seqwarm_kernels.utils.figures import save_both

from .allocator import replay
from .common.records import FIGURES

HEADS, LENGTH, LENGTHS = 12, 8192, [2**power for power in range(7, 15)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder for the figures")


def main(arguments: argparse.Namespace) -> None:
    folder = arguments.figures
    reaches = [measure_reach(ReachSettings(HEADS, length)) for length in LENGTHS]
    plan = plan_schedule(SequenceLengthScheduler(8, 1024, duration=3000), 10_000, 32, ModelSize(12, 768, 50257))
    print(save_both(functools.partial(reach_figure, reaches[LENGTHS.index(LENGTH)]), folder / "reach.png"))
    print(save_both(functools.partial(share_figure, reaches), folder / "attended_share.png"))
    print(save_both(functools.partial(plan_figure, plan), folder / "plan.png"))
    print(replay.draw(folder))
