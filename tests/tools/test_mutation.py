"""`make mutate`: the mutants it makes, and its page."""

import pytest

from tools.mutation import report
from tools.mutation.__main__ import ROOT
from tools.mutation.cpp_edits import cpp_edits
from tools.mutation.mutants import SURVIVED, read
from tools.mutation.python_edits import python_edits
from tools.mutation.targets import TARGETS

#: The operator and the result of each edit of a source.
PYTHON = {
    "x = a is b": [("comparison", "x = (a is not b)")],
    "x = (a + b) * c": [("arithmetic", "x = ((a - b)) * c"), ("arithmetic", "x = (a + b + c)")],
    "x = a and b": [("boolean", "x = (a or b)")],
    "x = '×', -1": [("constant", "x = ('×X'), -1"), ("constant", "x = '×', -(2)"), ("sign", "x = '×', (1)")],
    "x = min(a)": [("function", "x = (max)(a)")],
    "x = f(a, b=c, **d)": [("keyword", "x = (f(a, **d))")],
    "f(a)": [("deletion", "pass")],
    "def f():\n  return a": [("return", "def f():\n  return None")],
    "while a:\n  break": [("condition", "while (not a):\n  break"), ("loop", "while a:\n  continue")],
    # Left out:
    '"""Text of 1 + 1."""': [],
    "def f(a: 1 + 1 = b) -> 1 + 1: ...": [],
    "def f():\n  raise ValueError(1 + 1)": [],
}
CPP = {
    "x = a < b ? c : -d;": [
        ("comparison", "x = a <= b ? c : -d;"),
        ("comparison", "x = a >= b ? c : -d;"),
        ("sign", "x = a < b ? c : d;"),
    ],
    "return std::min(2.5f, a);": [
        ("function", "return std::max(2.5f, a);"),
        ("constant", "return std::min((2.5f + 1), a);"),
    ],
    "  a.b[c] += d;": [("arithmetic", "  a.b[c] -= d;"), ("deletion", "  ;")],
    "if (f(a)) {": [("condition", "if (!(f(a))) {")],
    "/* 1\n + 1 */": [],
    'TORCH_CHECK(a(1) == 1, "b");': [],
}


@pytest.mark.parametrize(("edits", "sources"), [(python_edits, PYTHON), (cpp_edits, CPP)])
def test_edits(edits, sources):
    for source, expected in sources.items():
        found = {(operator, source[:start] + text + source[end:]) for start, end, operator, text in edits(source)}
        assert found == set(expected), source


def test_files_of_targets_exist():
    for target in TARGETS:
        paths = {target.file, *(argument.partition("::")[0] for run in target.runs for argument in run.tests)}
        assert [path for path in paths if "/" in path and not (ROOT / path).exists()] == []


def test_the_page_shows_the_records_and_a_reason_for_each_survivor():
    outcomes = read()
    page = report.page(outcomes)
    assert (ROOT / report.PAGE).read_text() == page, "run python -m tools.mutation --report"
    assert "not explained yet" not in page
    survived = {mutant for mutant, outcome in outcomes.items() if outcome.result == SURVIVED}
    known = {(mutant.file, mutant.code, mutant.before, mutant.after) for mutant in survived}
    assert {entry[:4] for entry in report.REASONS} <= known
