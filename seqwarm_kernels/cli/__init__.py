"""The command line: `seqwarm {info,check,plan,padding,tune,demo}`, also as `python -m seqwarm_kernels`.

No file of this folder imports torch at its top, so that help and shell completion are quick.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from .. import __version__
from ..utils.progress import standard_error
from ..utils.urls import without_secrets
from . import check, completion, demo, info, padding, plan, tune
from .common import EXIT_STATUS, CommandError, HelpFormatter, Result, add_folder_of_figure

#: Each has HELP, EXAMPLES, add_arguments and run.
COMMANDS = {"info": info, "check": check, "plan": plan, "padding": padding, "tune": tune, "demo": demo}

#: Errors of files and folders that the user named. Others, such as a full disk, are no wrong usage.
_OF_NAMES = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)

_DESCRIPTION = "Sequence-length warmup and ALiBi attention for PyTorch. `seqwarm COMMAND --help` describes a command."

_EXAMPLES = """\
examples:
  seqwarm info
  seqwarm check
  seqwarm demo --quick
  seqwarm plan --duration 3000 --figure plan.png
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status of the process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed = make_parser().parse_args(arguments)
    parsed.command_line = without_secrets(shlex.join(["seqwarm", *arguments]))
    try:
        if getattr(parsed, "figure", None) is not None:  # what a figure lacks shows before the work
            add_folder_of_figure(parsed.figure)
        with redirect_stdout(sys.stderr) if parsed.json else nullcontext():  # a user's training may print
            result = parsed.run(parsed)
        _print(result, parsed.json)
    except CommandError as error:
        return _fail(parsed.command, error, error.status)
    except ImportError as error:
        return _fail(parsed.command, error, 1)
    except OSError as error:
        return _fail(parsed.command, error, 2 if isinstance(error, _OF_NAMES) or error.errno == errno.EROFS else 1)
    except KeyboardInterrupt:
        return _fail(parsed.command, "stopped", 130)
    return result.status


def make_parser() -> argparse.ArgumentParser:
    epilog = f"{_EXAMPLES}\n{completion.HELP}\n{EXIT_STATUS}"
    parser = argparse.ArgumentParser("seqwarm", description=_DESCRIPTION, epilog=epilog, formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=f"seqwarm_kernels {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(COMMANDS)}}}")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=command.HELP,
            description=f"{command.HELP[0].upper()}{command.HELP[1:]}.",
            epilog=f"{command.EXAMPLES}\n{EXIT_STATUS}",
            formatter_class=HelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
        subparser.set_defaults(run=command.run)
    completion.add_argument(parser, commands.choices.values())
    return parser


def _print(result: Result, as_json: bool) -> None:
    try:
        print(json.dumps(result.json, indent=2) if as_json else result.text, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe: nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(command: str, error: Exception | str, status: int) -> int:
    print(f"seqwarm {command}: error: {without_secrets(str(error))}", file=standard_error())
    return status
