"""`make mutate`: the mutants it makes, those it tries next, its records and its page."""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from tools.mutation import records, report, trial
from tools.mutation.__main__ import ROOT
from tools.mutation.cpp_edits import cpp_edits
from tools.mutation.mutants import shuffled_mutants
from tools.mutation.python_edits import python_edits
from tools.mutation.records import FAILED, SURVIVED, TIMED_OUT
from tools.mutation.targets import TARGETS, Run

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


def in_worker(tree, function, *arguments):
    """Call a function in a new process, as `tools.mutation` does. A fork of this one may hang."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), start_in, (tree,)) as executor:
        return executor.submit(function, *arguments).result()


def start_in(tree):
    trial._tree = tree
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True


def tried():
    """A mutant that a test fails, one that none fails, and one that hangs."""
    trial._SLACK = 2.0
    mutants = {mutant.operator: mutant for mutant in shuffled_mutants(trial._tree, "counting.py")}
    runs = {name: Run((f"test_{name}.py",)) for name in ("ok", "all")}
    return [
        trial.try_mutant(mutants[operator], [runs[name] for name in names])[:2]
        for operator, names in (("comparison", ["ok", "all", "ok"]), ("comparison", ["ok"]), ("deletion", ["all"]))
    ]


@pytest.mark.slow
def test_try_mutant(tmp_path):
    counting = "def count(stop):\n    n = 0\n    while n < stop:\n        n += 1\n    return n\n"
    for name, text in {
        "counting.py": counting,
        "conftest.py": "from hypothesis import settings\nsettings.register_profile('mutation')\n",
        "test_all.py": "import counting\n\ndef test_count(): assert counting.count(3) == 3\n",
        "test_ok.py": "def test_ok(): pass\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert in_worker(tmp_path, tried) == [(FAILED, "test_all.py::test_count"), (SURVIVED, None), (TIMED_OUT, None)]
    assert (tmp_path / "counting.py").read_text() == counting


def test_the_page_shows_the_records_and_a_reason_for_each_survivor():
    outcomes = records.read()
    page = report.page(outcomes)
    assert (ROOT / report.PAGE).read_text() == page, "run python -m tools.mutation --report"
    assert "not explained yet" not in page
    survived = {mutant for mutant, outcome in outcomes.items() if outcome.result == SURVIVED}
    known = {(mutant.file, mutant.code, mutant.before, mutant.after) for mutant in survived}
    assert {entry[:4] for entry in report.REASONS} <= known
