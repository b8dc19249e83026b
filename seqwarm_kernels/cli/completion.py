"""Completion of commands and options in the user's shell, by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

#: Those of shtab, which is imported only when its script is asked for.
SHELLS = ("bash", "zsh", "tcsh", "fish", "powershell")

HELP = """\
shell completion:
  pip install "seqwarm_kernels[completion]"
  bash  seqwarm --print-completion bash > ~/.local/share/bash-completion/completions/seqwarm
  zsh   seqwarm --print-completion zsh > ~/.zfunc/_seqwarm    # a folder that is in $fpath
  fish  seqwarm --print-completion fish > ~/.config/fish/completions/seqwarm.fish
  Then open a new shell.
"""

#: Metavars of options that name files or folders.
_FILES, _FOLDERS = ("FILE",), ("DIR",)


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--print-completion", action=_PrintCompletion, choices=SHELLS, help="print the completion script of a shell"
    )


class _PrintCompletion(argparse.Action):
    """Prints and exits, as --help does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.exit(1, 'seqwarm: error: completion needs shtab: pip install "seqwarm_kernels[completion]"\n')
        for action in _actions(parser):
            if action.metavar in (*_FILES, *_FOLDERS):
                action.complete = shtab.FILE if action.metavar in _FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
        print(shtab.complete(parser, str(values)))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _actions(subparser)
