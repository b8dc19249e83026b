"""Each message that the troubleshooting page quotes is one of the package's."""

import ast
import re

import pytest

from . import markdown

pytestmark = pytest.mark.xdist_group("troubleshooting")  # one worker reads the messages
PAGE = markdown.ROOT / "docs" / "help" / "troubleshooting.md"
QUOTES = [match["code"].strip() for match in markdown.FENCE.finditer(PAGE.read_text()) if match["language"] == "text"]
SHORTEST = 25  #: a message of fewer constant characters would match too much


@pytest.fixture(scope="module")
def messages():
    """Patterns of all strings in the package, with a hole for each value."""
    patterns = []
    for path in (markdown.ROOT / "seqwarm_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            constants = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            texts = [text for text in constants if isinstance(text, str)]
            if sum(map(len, texts)) >= SHORTEST and any(max(texts, key=len)[:SHORTEST] in quote for quote in QUOTES):
                pattern = "".join(re.escape(text) if isinstance(text, str) else ".*" for text in constants)
                patterns.append(re.compile(pattern.replace(r"\{\}", ".*"), re.DOTALL))  # of str.format
    return patterns


@pytest.mark.parametrize("quote", QUOTES)
def test_the_message_exists(quote, messages):
    assert any(pattern.fullmatch(quote) for pattern in messages)
