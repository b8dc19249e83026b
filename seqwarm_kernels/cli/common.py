"""What the commands share: results, errors, options, and the layout of their help."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..schedule.pacing import Pacing

EXIT_STATUS = """\
exit status:
  0    success
  1    the command failed: no stable schedule, a mismatch or
       a missing backend in check, a missing package, a full
       disk, an error in your own training
  2    wrong usage: an option or a file that you named does not fit
  130  stopped by Ctrl-C
"""

#: As in seqwarm_kernels.schedule.scheduler, whose import takes seconds.
UNITS = ("step", "token", "sample")

#: Defaults of the demo on a CPU and on a GPU, as in seqwarm_kernels.demo.settings.
DEMO_DEFAULTS = {
    "steps": (700, 800),
    "seq_length": (256, 1024),
    "batch_size": (8, 16),
    "layers": (3, 8),
    "width": (128, 512),
    "peak_learning_rate": (0.004, 0.001),
}


@dataclass(frozen=True)
class Result:
    """What a command prints, and its exit status."""

    json: Any  #: for --json, plain values
    text: str
    status: int = 0


class CommandError(Exception):
    """An error whose message is all that the user needs to see."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def usage_errors(arguments: argparse.Namespace) -> Iterator[None]:
    """Turns a ValueError or TypeError about arguments into a message about the options that the user typed."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise CommandError(_with_option_names(str(error), arguments), status=2) from error


def _with_option_names(message: str, arguments: argparse.Namespace) -> str:
    """Replaces argument names by options: the first word, and names that cannot be words of a sentence."""
    for name in vars(arguments):
        where = r"(?<![\w-])" if "_" in name else "^"
        message = re.sub(rf"{where}{name}(?= |$)", option(name), message)
    return message


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default to the help of every option that has one, and keeps the lines of examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        without = action.default is None or action.default is False or action.default is argparse.SUPPRESS
        if action.help is None or without or "(default: " in action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def add_figure(parser: argparse.ArgumentParser, shows: str, *, page: bool = False) -> None:
    """Adds --figure. With `page`, the command also writes a page beside the PNG."""
    beside = ", and an interactive page to the same name with the suffix .html" if page else ""
    parser.add_argument(
        "--figure", type=Path, metavar="PNG", help=f"draw {shows} to this file{beside} (default: no figure)"
    )


def add_pacing(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    add = parser.add_argument
    add("--step-size", type=int, default=8, metavar="TOKENS", help="lengths grow in multiples of this number")
    add("--root", type=float, metavar="DEGREE", help="grow by the root of this degree, fast at first (default: linear)")


def demo_default(name: str) -> str:
    cpu, gpu = DEMO_DEFAULTS[name]
    return f"(default: {cpu} on a CPU, {gpu} on a GPU)"


def pacing(degree: float | None) -> Pacing:
    """The pacing of --root."""
    from ..schedule.pacing import linear, root

    try:
        return linear if degree is None else root(degree)
    except ValueError as error:
        raise ValueError(str(error).replace("degree", "--root", 1)) from error


def check_figure(path: Path | None, *, page: bool = False, made: Path | None = None) -> None:
    """Checks --figure and its packages before the work. `made` is a folder that the command itself makes.

    Raises:
        ValueError: the file cannot be written.
        ImportError: a package is missing.
    """
    if path is None:
        return
    from ..utils.checks import check_matplotlib
    from ..utils.report_page import check_plotly

    check_matplotlib()
    if page:
        check_plotly()
    if path.is_dir():
        raise ValueError(f"--figure must be a file, got the folder {path}")
    if path.suffix.lower() != ".png":
        raise ValueError(f"--figure must be a file with the suffix .png, got {path}")
    if made is not None and path.parent.resolve() == made.resolve():
        return
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ValueError(f"--figure must be in an existing folder with write permission, got {path}")
