"""The command `demo`: trains a small GPT with and without sequence-length warmup, and compares the two runs."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from .common import CommandError, Result, demo_default, usage_errors

if TYPE_CHECKING:  # imported by the functions, so that help is quick
    from ..demo.report_folder import ReportFolder
    from ..demo.settings import Settings
    from ..demo.text import Corpus

HELP = "train a small GPT with and without warmup, and compare"
EXAMPLES = """\
Writes a folder with report.html (curves to hover over, no network needed), PNG
figures, summary.md, and the records of all evaluations.

examples:
  seqwarm demo --quick
  seqwarm demo --text my_corpus/ --seq-length 512 --report reports/mine
  seqwarm demo --resume reports/mine
"""

#: The value of --resume without a folder.
NEWEST = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the demo. An option that is not given is None."""
    add = parser.add_argument
    add("--device", help="cpu, cuda or cuda:INDEX (default: cuda if there is a GPU)")
    steps_help = f"token budget of each run, in steps at the full length {demo_default('steps')}"
    add("--steps", type=int, metavar="N", help=steps_help)
    add("--seq-length", type=int, metavar="TOKENS", help=f"full sequence length {demo_default('seq_length')}")
    add("--seed", type=int, metavar="N", help="seed of the weights and the batches (default: 0)")
    text_help = "UTF-8 text files, or folders of them, to train on (default: Python's standard library)"
    add("--text", nargs="+", metavar="FILE", help=text_help)
    add("--report", metavar="DIR", help="new folder for the results (default: reports/demo-DATE-TIME)")
    packing_help = "train on paragraphs packed without padding, instead of windows of the text"
    add("--packing", action="store_true", default=None, help=packing_help)
    quick_help = "short run of about a minute, with fewer steps and a smaller model"
    add("--quick", action="store_true", default=None, help=quick_help)
    resume_help = "continue a run that was stopped (default without DIR: the newest one in reports/)"
    add("--resume", nargs="?", const=NEWEST, metavar="DIR", help=resume_help)


def run(arguments: argparse.Namespace) -> Result:
    """Trains, compares and writes the report."""
    with usage_errors(arguments):
        folder, settings, corpus = _prepare(arguments)
    try:
        return _train_and_report(folder, settings, corpus)
    except KeyboardInterrupt:
        resume = f"seqwarm demo --resume {shlex.quote(str(folder.path))}"
        raise CommandError(f"stopped. To continue: {resume}", status=130) from None


def _prepare(arguments: argparse.Namespace) -> tuple[ReportFolder, Settings, Corpus]:
    """Checks the options and reads the text, so that user errors are found before training."""
    from ..demo.report_folder import ReportFolder
    from ..demo.settings import GivenOptions
    from ..demo.text import read_corpus
    from ..utils.checks import check_matplotlib
    from ..utils.report_page import check_plotly

    check_matplotlib()
    check_plotly()
    given = GivenOptions.from_arguments(arguments)
    if arguments.resume is None:
        settings = given.complete()
        corpus = read_corpus(settings.text, settings.seq_length)
        folder = ReportFolder.create(arguments.report, settings, corpus, arguments.command_line)
        return folder, settings, corpus
    folder = ReportFolder.to_resume(arguments.resume or None, arguments.report)
    settings = folder.settings()
    given.check_agree(settings, folder.path)
    corpus = read_corpus(settings.text, settings.seq_length)
    folder.check_same_text(corpus)
    return folder, settings, corpus


def _train_and_report(folder: ReportFolder, settings: Settings, corpus: Corpus) -> Result:
    from ..demo.records import Comparison
    from ..demo.report import report_text, result_as_json, write_report
    from ..demo.training import run_both

    print(f"{settings.describe()}\n{corpus.describe()}\nReport folder: {folder.path}\n")
    comparison = Comparison.of(run_both(folder, settings, corpus))
    write_report(folder, settings, corpus, comparison)
    return Result(result_as_json(folder, settings, comparison), report_text(folder, comparison))
