"""Report pages in Markdown, which show a figure beside them."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from .. import __version__
from .files import write_atomically


def write_page(path: Path, title: str, parts: Iterable[str]) -> None:
    write_atomically(path, "\n\n".join([f"# {title}", *filter(None, parts)]).encode() + b"\n")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |" for cells in lines)


def how_it_was_made(command_line: str, settings: Mapping[str, object]) -> str:
    """A table of everything that is needed to make the page again."""
    versions = f"seqwarm_kernels {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    values = {"command": f"`{command_line}`", **settings, "versions": versions}
    return table(["setting", "value"], [[name, str(value)] for name, value in values.items()])
