"""Reads the project's Markdown pages."""

import contextlib
import io
import re
from itertools import zip_longest
from pathlib import Path
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


def run(page, names):
    """Run the Python blocks of a page in one namespace. Returns what each printed and what the page says."""
    outputs = []
    for block in python_blocks((ROOT / page).read_text()):
        if block.not_run:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * (block.line - 1) + block.code, str(ROOT / page), "exec"), names)
        if block.printed is not None:
            outputs.append((printed.getvalue(), block.printed))
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
