"""Changes of C++ code, found by regular expressions in code of clang-format's layout.

Left out are comments, strings, preprocessor lines, and the calls that raise: TORCH_CHECK and static_assert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_NOT_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|^[ \t]*#[^\n]*|^[ \t]*template <[^\n]*',
    re.DOTALL | re.MULTILINE,
)
_RAISING = re.compile(r"\b(?:TORCH_(?:INTERNAL_)?(?:CHECK|ASSERT)\w*|static_assert)(?=\()")
_CONDITION = re.compile(r"\b(?:if|while) (?=\()")
#: A call, an assignment without a declaration, or a count, on one line.
_STATEMENT = re.compile(
    r"^[ \t]+((?!return\b)[\w.>:\[\]<-]+\([^;{}\n]*\);|[^\s;{}]+ [-+*/|&]?= [^;{}\n]+;|\+\+[\w.]+;)$", re.MULTILINE
)

_COMPARISONS = {"<": ["<=", ">="], "<=": ["<", ">"], ">": [">=", "<="], ">=": [">", "<"], "==": ["!="], "!=": ["=="]}
_ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&"}
_ARITHMETIC |= {"+=": "-=", "-=": "+=", "*=": "+=", "/=": "*=", "|=": "&=", "^=": "&="}
_WORDS = {
    ("boolean", "&&", "||"),
    ("boolean", "||", "&&"),
    ("constant", "true", "false"),
    ("constant", "false", "true"),
    ("function", "min", "max"),
    ("function", "max", "min"),
    ("function", "any_of", "all_of"),
    ("function", "all_of", "any_of"),
    ("loop", "break", "continue"),
    ("loop", "continue", "break"),
}

#: Operator, pattern, replacement. An operator with two operands has a space on both sides.
_RULES = [
    *(("comparison", rf"(?<= ){old}(?= )", new) for old, others in _COMPARISONS.items() for new in others),
    *(("arithmetic", rf"(?<= ){re.escape(old)}(?= )", new) for old, new in _ARITHMETIC.items()),
    *((operator, rf"(?<!\w){re.escape(old)}(?!\w)", new) for operator, old, new in sorted(_WORDS)),
    ("arithmetic", r"\+\+(?=\w)", "--"),
    ("sign", r"!(?=[\w(])", ""),
    ("sign", r"(?<=[ (\[])-(?=[\w(])", ""),
    ("constant", r"(?<![\w.])\d+(?:\.\d*f?)?(?![\w.])", r"(\g<0> + 1)"),
]


def cpp_edits(source: str) -> Iterator[tuple[int, int, str, str]]:
    """Begin, end, operator and replacement of each change."""
    code = _only_code(source)
    for operator, pattern, replacement in _RULES:
        for match in re.finditer(pattern, code):
            yield *match.span(), operator, match.expand(replacement)
    for match in _STATEMENT.finditer(code):
        yield *match.span(1), "deletion", ";"
    for match in _CONDITION.finditer(code):
        end = _closing(code, match.end())
        yield match.end(), end, "condition", f"(!{source[match.end() : end]})"


def _only_code(source: str) -> str:
    """The source with spaces in place of what is left out."""
    code = _NOT_CODE.sub(lambda match: _blank(match[0]), source)
    for match in _RAISING.finditer(code):
        end = _closing(code, match.end())
        code = code[: match.start()] + _blank(code[match.start() : end]) + code[end:]
    return code


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _closing(code: str, start: int) -> int:
    """The index after the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[index], 0)
        if depth == 0:
            return index + 1
    raise ValueError(f"unbalanced parenthesis at {start}")
