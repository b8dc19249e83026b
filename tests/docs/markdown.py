"""Reads the project's Markdown pages."""

import contextlib
import io
import re
import sys
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_FILES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
PAGES = sorted(str(path.relative_to(ROOT)) for path in _FILES)
FENCE = re.compile(r"^(?P<ticks>`{3,}|:{3,})(?P<language>.*?)\n(?P<code>.*?)^(?P=ticks)$", re.MULTILINE | re.DOTALL)
#: A block after `<!-- not run: reason -->` is not run.
NOT_RUN = re.compile(r"<!-- not run: (.+) -->\n\Z")


class Block(NamedTuple):
    code: str
    line: int  #: of the block's first line of code
    not_run: str | None  #: the reason
    printed: str | None  #: what it prints, if a block of text follows


def python_blocks(text):
    fences = list(FENCE.finditer(text))
    for fence, following in zip_longest(fences, fences[1:]):
        if fence["language"].strip() != "python":
            continue
        reason = NOT_RUN.search(text[: fence.start()])
        prints = following and following["language"] == "text" and not text[fence.end() : following.start()].strip()
        line = text[: fence.start("code")].count("\n") + 1
        yield Block(fence["code"], line, reason and reason[1], following["code"] if prints else None)


def calls_in_tables(text):
    """The code in the first words of each cell below a last column called "seqwarm_kernels"."""
    for table in re.findall(r"^\|.*seqwarm_kernels \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE):
        for row in table.splitlines():
            yield re.search(r"[^|]*\|$", row)[0].split("`")[1]


def run(page, names, monkeypatch):
    """Run a page's Python blocks, then the calls in its tables, in one module.

    Returns what each block printed and what the page says.
    """
    module = ModuleType("page")  # torch.compile looks for globals in the module
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "page", module)
    text, outputs = (ROOT / page).read_text(), []
    for block in python_blocks(text):
        if block.not_run:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * (block.line - 1) + block.code, str(ROOT / page), "exec"), vars(module))
        if block.printed is not None:
            outputs.append((printed.getvalue(), block.printed))
    for call in calls_in_tables(text):
        exec(call, vars(module))
    return outputs


def prose(text):
    """The text without blocks of code."""
    return FENCE.sub("", text)


def links(text):
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)) if "://" not in target]


def anchors(text):
    """The anchors of a page's headings, as a code host and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
