"""The command `demo`: trains a small GPT with and without sequence-length warmup, and compares the two runs."""

from __future__ import annotations

import argparse
import shlex
import time
from dataclasses import asdict
from pathlib import Path

from .common import CommandError, Result, add_training, training_settings, usage_errors

HELP = "train a small GPT with and without warmup, and compare"
EXAMPLES = """\
Writes a folder with report.md, its figure, and the records of all evaluations.
The same command with the same --report continues a run that was stopped.

examples:
  seqwarm demo --quick
  seqwarm demo --text my_corpus/ --seq-length 512 --report reports/mine
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_training(parser)
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="seed of the weights and the batches")
    add("--quick", action="store_true", help="short run of about a minute, with fewer steps and a smaller model")
    report_help = "folder for the results; continues a run that was stopped (default: reports/demo-DATE-TIME)"
    add("--report", type=Path, metavar="DIR", help=report_help)


def run(arguments: argparse.Namespace) -> Result:
    """Trains, compares and writes the report."""
    from ..demo.records import Comparison
    from ..demo.report import report_text, result_as_json, write_report
    from ..demo.text import read_corpus
    from ..demo.training import run_both
    from ..utils.checks import check_matplotlib
    from ..utils.run_folder import RunFolder

    check_matplotlib()
    with usage_errors():
        settings = training_settings(arguments, quick=arguments.quick)
        corpus = read_corpus(arguments.text, settings.seq_length)
        path = arguments.report or Path("reports") / time.strftime("demo-%Y%m%d-%H%M%S")
        folder = RunFolder.open(path, {**asdict(settings), "text_sha256": corpus.fingerprint()})
    print(f"{settings.describe()}\nText: {corpus.describe()}\nReport folder: {path}\n")
    try:
        comparison = Comparison.of(run_both(folder, settings, corpus))
    except KeyboardInterrupt:
        again = f"the same command with --report {shlex.quote(str(path))} continues it"
        raise CommandError(f"stopped: {again}", status=130) from None
    write_report(folder, settings, corpus, comparison, arguments.command_line)
    return Result(result_as_json(folder, settings, comparison), report_text(folder, comparison))
