"""Reads the project's Markdown pages."""

import re
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


def python_blocks(text):
    for match in FENCE.finditer(text):
        if match["language"].strip() == "python":
            reason = NOT_RUN.search(text[: match.start()])
            yield Block(match["code"], text[: match.start("code")].count("\n") + 1, reason and reason[1])


def prose(text):
    """The text without blocks of code."""
    return FENCE.sub("", text)


def links(text):
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)) if "://" not in target]


def anchors(text):
    """The anchors of a page's headings, as a code host and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
