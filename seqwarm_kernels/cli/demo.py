"""The command `demo`: trains a small GPT with and without sequence-length warmup, and compares the two runs."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the functions import the demo, so that --help and info are quick
    from ..demo.report_folder import ReportFolder
    from ..demo.settings import Settings
    from ..demo.text import Corpus

#: The value of --resume without a folder.
NEWEST = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the demo. An option that is not given is None."""
    add = parser.add_argument
    add("--device", help="cpu, cuda or cuda:INDEX; default: cuda if there is a GPU")
    add("--steps", type=int, metavar="N", help="token budget of each run, in steps at the full length")
    add("--seq-length", type=int, metavar="TOKENS", help="full sequence length")
    add("--seed", type=int, metavar="N", help="seed of the weights and the batches; default 0")
    text_help = "UTF-8 text files, or folders of them, to train on; default: Python's standard library"
    add("--text", nargs="+", metavar="FILE", help=text_help)
    add("--report", metavar="DIR", help="new folder for the results; default reports/demo-DATE-TIME")
    packing_help = "train on paragraphs packed without padding, instead of windows of the text"
    add("--packing", action="store_true", default=None, help=packing_help)
    add("--quick", action="store_true", default=None, help="short run of less than a minute")
    resume_help = "continue a run that was stopped; without DIR, the newest one in reports/"
    add("--resume", nargs="?", const=NEWEST, metavar="DIR", help=resume_help)


def run(arguments: argparse.Namespace) -> int:
    """Trains, compares and writes the report. Returns 0, 2 after a user error, or 130 after Ctrl-C."""
    try:
        folder, settings, corpus = _prepare(arguments)
    except (ValueError, TypeError, OSError, ImportError) as error:
        return _fail(error)
    try:
        return _train_and_report(folder, settings, corpus)
    except KeyboardInterrupt:
        resume = f"python -m seqwarm_kernels demo --resume {shlex.quote(str(folder.path))}"
        print(f"\nStopped. To continue: {resume}", file=sys.stderr)
        return 130
    except OSError as error:  # for example a full disk
        return _fail(error)


def _fail(error: Exception) -> int:
    print(f"seqwarm_kernels demo: {error}", file=sys.stderr)
    return 2


def _prepare(arguments: argparse.Namespace) -> tuple[ReportFolder, Settings, Corpus]:
    """Checks the options and reads the text, so that user errors are found before training."""
    from ..demo.report_folder import ReportFolder
    from ..demo.settings import GivenOptions
    from ..demo.text import read_corpus
    from ..utils.checks import check_matplotlib

    check_matplotlib()
    given = GivenOptions.from_arguments(arguments)
    if arguments.resume is None:
        settings = given.complete()
        corpus = read_corpus(settings.text, settings.seq_length)
        return ReportFolder.create(arguments.report, settings, corpus), settings, corpus
    folder = ReportFolder.to_resume(arguments.resume or None, arguments.report)
    settings = folder.settings()
    given.check_agree(settings, folder.path)
    corpus = read_corpus(settings.text, settings.seq_length)
    folder.check_same_text(corpus)
    return folder, settings, corpus


def _train_and_report(folder: ReportFolder, settings: Settings, corpus: Corpus) -> int:
    from ..demo.report import write_report
    from ..demo.training import run_both

    print(f"{settings.describe()}\n{corpus.describe()}\nReport folder: {folder.path}\n")
    records = run_both(folder, settings, corpus)
    print(write_report(folder, settings, corpus, records))
    return 0
