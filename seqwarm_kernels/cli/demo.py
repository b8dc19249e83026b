"""The command: its options, its exit codes, and what it says when something is wrong."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the rest is imported where it is used, so that --help and info stay quick
    from ..demo.report_folder import ReportFolder
    from ..demo.settings import Settings
    from ..demo.text import Corpus

#: --resume without a folder.
NEWEST = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the demo. None stands for: not given."""
    parser.add_argument("--device", help="cpu, cuda or cuda:INDEX; default: a GPU where there is one")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="the token budget of each run, in steps at the full length"
    )
    parser.add_argument("--seq-length", type=int, metavar="TOKENS", help="the full sequence length")
    parser.add_argument("--seed", type=int, metavar="N", help="of the weights and the batches; default 0")
    parser.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="UTF-8 text files, or folders of them, to train on; default: Python's standard library",
    )
    parser.add_argument("--report", metavar="DIR", help="a new folder for the results; default reports/demo-DATE-TIME")
    parser.add_argument(
        "--packing",
        action="store_true",
        default=None,
        help="train on paragraphs packed without padding, in place of windows of the text",
    )
    parser.add_argument("--quick", action="store_true", default=None, help="a short run, in under a minute")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST,
        metavar="DIR",
        help="continue a run that was stopped; without DIR the newest one in reports/",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, compare, report. Returns 0, 2 after an error of the user's, 130 after Ctrl-C."""
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
    except OSError as error:  # the disk is full, the folder is gone
        return _fail(error)


def _fail(error: Exception) -> int:
    print(f"seqwarm_kernels demo: {error}", file=sys.stderr)
    return 2


def _prepare(arguments: argparse.Namespace) -> tuple[ReportFolder, Settings, Corpus]:
    """Everything that can be wrong is found here, before any training."""
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
    from ..demo.experiment import run_both
    from ..demo.report import write_report

    print(f"{settings.describe()}\n{corpus.describe()}\nReport folder: {folder.path}\n")
    records = run_both(folder, settings, corpus)
    print(write_report(folder, settings, corpus, records))
    return 0
