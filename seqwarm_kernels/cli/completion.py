"""Completion of commands and options in the user's shell, by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

HELP = """\
shell completion:
  pip install "seqwarm_kernels[completion]"
  bash  seqwarm --print-completion bash > ~/.local/share/bash-completion/completions/seqwarm
  zsh   seqwarm --print-completion zsh > ~/.zfunc/_seqwarm    # a folder that is in $fpath
  fish  seqwarm --print-completion fish > ~/.config/fish/completions/seqwarm.fish
  Then open a new shell.
"""

#: Metavars of options that name files or folders, and shtab's constants for them.
_COMPLETED = {"FILE": "FILE", "DIR": "DIRECTORY"}


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--print-completion` to a parser that has all its commands, if shtab is installed."""
    try:
        import shtab
    except ImportError:
        return
    shtab.add_argument_to(parser, help="print the completion script of a shell")
    for action in _actions(parser):
        if action.metavar in _COMPLETED:
            action.complete = getattr(shtab, _COMPLETED[action.metavar])  # type: ignore[attr-defined]


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _actions(subparser)
