"""Completion of commands and options in the user's shell, by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

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


def add_argument(parser: argparse.ArgumentParser, commands: Iterable[argparse.ArgumentParser]) -> None:
    """Add `--print-completion` to the parser of these commands, if shtab is installed."""
    try:
        import shtab
    except ImportError:
        return
    shtab.add_argument_to(parser, help="print the completion script of a shell")
    for action in (action for command in commands for action in command._actions):
        if action.metavar in _COMPLETED:
            action.complete = getattr(shtab, _COMPLETED[action.metavar])  # type: ignore[attr-defined]
