"""What the commands share: results, errors, options, and the layout of their help."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..demo.settings import CPU, GPU, Settings, settings_for

if TYPE_CHECKING:  # imported by the functions, so that help is quick
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
def usage_errors() -> Iterator[None]:
    """A ValueError or TypeError of the library about what the user typed is wrong usage, without a traceback."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise CommandError(str(error), status=2) from error


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default to the help of every option that has one, and keeps the lines of examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        without = action.default is None or action.default is False or action.default is argparse.SUPPRESS
        if action.help is None or without or "(default: " in action.help:
            return action.help
        return f"{action.help} (default: %(default)s)"


def count(text: str) -> int:
    """The type of options that are at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def add_figure(parser: argparse.ArgumentParser, shows: str) -> None:
    help_text = f"draw {shows} to this file, .png or .svg (default: no figure)"
    parser.add_argument("--figure", type=_figure_path, metavar="FILE", help=help_text)


def _figure_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"must end in .png or .svg, got {text}")
    return path


def add_folder_of_figure(path: Path) -> None:
    """Raises ImportError without matplotlib, and OSError if there cannot be such a folder."""
    from ..utils.checks import check_matplotlib

    check_matplotlib()
    path.parent.mkdir(parents=True, exist_ok=True)


#: Settings of the demo's GPT that have an option: name, type, metavar and description.
TRAINING = (
    ("steps", count, "N", "token budget of a whole run, in steps at the full length"),
    ("seq_length", count, "TOKENS", "full sequence length"),
    ("batch_size", count, "ROWS", "rows in a step"),
    ("layers", count, "N", "number of layers"),
    ("width", count, "N", "width of the model, a multiple of its heads"),
    ("peak_learning_rate", float, "RATE", "peak learning rate, reached after 5%% of the tokens"),
)


def add_pacing(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    add = parser.add_argument
    add("--step-size", type=count, default=8, metavar="TOKENS", help="lengths grow in multiples of this number")
    add("--root", type=float, metavar="DEGREE", help="grow by the root of this degree, fast at first (default: linear)")


def pacing(degree: float | None) -> Pacing:
    """The pacing of --root."""
    from ..schedule.pacing import linear, root

    return linear if degree is None else root(degree)


def add_training(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The options of the demo's GPT. One that is not given is None."""
    add = parser.add_argument
    add("--device", help="such as cpu or cuda:1 (default: cuda if there is a GPU)")
    text_help = "UTF-8 text files, or folders of them, to train on (default: Python's standard library)"
    add("--text", nargs="+", metavar="FILE", help=text_help)
    for name, kind, metavar, what in TRAINING:
        option = "--" + name.removeprefix("peak_").replace("_", "-")
        what += f" (default: {getattr(CPU, name)} on a CPU, {getattr(GPU, name)} on a GPU)"
        add(option, type=kind, dest=name, metavar=metavar, help=what)


def training_settings(arguments: argparse.Namespace, **others: Any) -> Settings:
    given = {name: getattr(arguments, name) for name, *_ in TRAINING}
    return settings_for(arguments.device, seed=arguments.seed, **given, **others)
