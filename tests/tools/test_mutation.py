"""`make mutate`: the mutants it makes, those it tries next, its records and its page."""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from tools.mutation import records, report, trial
from tools.mutation.__main__ import ROOT, pending
from tools.mutation.cpp_edits import cpp_edits
from tools.mutation.mutants import Mutant, shuffled_mutants
from tools.mutation.python_edits import python_edits
from tools.mutation.records import FAILED, NOT_BUILT, SURVIVED, TIMED_OUT, Outcome
from tools.mutation.targets import TARGETS, Run

MUTANT = Mutant("file.py", "0123", 4, 1, "arithmetic", "x = a + b", "a + b", "(a - b)")


def mutated(edits, source):
    """The source with each edit, and the edit's operator."""
    return {(operator, source[:start] + text + source[end:]) for start, end, operator, text in edits(source)}


PYTHON = {
    "x = a < b": [("comparison", "x = (a <= b)"), ("comparison", "x = (a >= b)")],
    "x = a is b": [("comparison", "x = (a is not b)")],
    "x = a in b == c": [("comparison", "x = (a not in b == c)"), ("comparison", "x = (a in b != c)")],
    "x = (a + b) * c": [("arithmetic", "x = ((a - b)) * c"), ("arithmetic", "x = (a + b + c)")],
    "x = (a %\n  b)": [("arithmetic", "x = ((a // b))")],
    "x = a and b": [("boolean", "x = (a or b)")],
    "x = not a": [("sign", "x = (a)")],
    "x = '×', -1": [("constant", "x = ('×X'), -1"), ("constant", "x = '×', -(2)"), ("sign", "x = '×', (1)")],
    "x = True": [("constant", "x = (False)")],
    "x = min(a)": [("function", "x = (max)(a)")],
    "x = tl.maximum(a)": [("function", "x = (tl.minimum)(a)")],
    "x = f(a, b=c, **d)": [("keyword", "x = (f(a, **d))")],
    "a += b": [("deletion", "pass"), ("arithmetic", "a -= b")],
    "f(a)": [("deletion", "pass")],
    "a.b = c": [("deletion", "pass")],
    "def f():\n  return a": [("return", "def f():\n  return None")],
    "while a:\n  break": [("condition", "while (not a):\n  break"), ("loop", "while a:\n  continue")],
    "x = [a for a in b if c]": [("condition", "x = [a for a in b if (not c)]")],
}

CPP = {
    "x = a < b ? c : -d;": [
        ("comparison", "x = a <= b ? c : -d;"),
        ("comparison", "x = a >= b ? c : -d;"),
        ("sign", "x = a < b ? c : d;"),
    ],
    "auto x = std::min(a + b, c);": [
        ("function", "auto x = std::max(a + b, c);"),
        ("arithmetic", "auto x = std::min(a - b, c);"),
    ],
    "return 2.5f && !a;": [
        ("constant", "return (2.5f + 1) && !a;"),
        ("boolean", "return 2.5f || !a;"),
        ("sign", "return 2.5f && a;"),
    ],
    "for (; a; ++b) {": [("arithmetic", "for (; a; --b) {")],
    "  a.b[c] += d;": [("arithmetic", "  a.b[c] -= d;"), ("deletion", "  ;")],
    "  std::fill(a, b(c));": [("deletion", "  ;")],
    "if (f(a)) {": [("condition", "if (!(f(a))) {")],
}


@pytest.mark.parametrize(
    ("edits", "source", "expected"),
    [(python_edits, *each) for each in PYTHON.items()] + [(cpp_edits, *each) for each in CPP.items()],
)
def test_edits(edits, source, expected):
    assert mutated(edits, source) == set(expected)


LEFT_OUT = {
    python_edits: (
        '"""Text of 1 + 1."""',
        "from __future__ import annotations",
        "def f(a: 1 + 1 = b) -> 1 + 1: ...",
        "@f(1 + 1)\nclass A: pass",
        "def f():\n  raise ValueError(1 + 1)",
        "x = f'{1 + 1}'",
        "x = zip(*a, strict=True)",
    ),
    cpp_edits: (
        "// 1 + 1",
        "/* 1\n + 1 */",
        'f = "1 + 1";',
        "#if A == 1",
        "  template <int a = 1>",
        'TORCH_CHECK(a(1) == 1, "b");',
    ),
}


def test_what_is_left_out():
    for edits, sources in LEFT_OUT.items():
        assert [source for source in sources if list(edits(source))] == []


def test_a_mutant_is_its_file_with_one_change(tmp_path):
    (tmp_path / "file.py").write_text("x = a + b\n")
    (mutant,) = shuffled_mutants(tmp_path, "file.py")
    assert mutant == MUTANT._replace(source=mutant.source)
    assert mutant.apply("x = a + b\n") == "x = (a - b)\n"


def test_mutants_of_a_target_can_be_told_apart_and_keep_their_order():
    for target in TARGETS:
        source = (ROOT / target.file).read_text()
        mutants = shuffled_mutants(ROOT, target.file)
        assert len({(mutant, mutant.apply(source)) for mutant in mutants}) == len(mutants) >= 10, target.file
        paths = {argument.partition("::")[0] for run in target.runs for argument in run.tests}
        assert [path for path in paths if path.startswith("tests/") and not (ROOT / path).exists()] == []
    assert mutants == shuffled_mutants(ROOT, target.file)


@pytest.fixture
def project(tmp_path):
    """A small project in place of a worker's tree."""
    for name, text in {
        "counting.py": "def count(stop):\n    n = 0\n    while n < stop:\n        n += 1\n    return n\n",
        "conftest.py": "from hypothesis import settings\nsettings.register_profile('mutation')\n",
        "test_all.py": "import counting\n\ndef test_count(): assert counting.count(3) == 3\n",
        "test_ok.py": "def test_ok(): pass\n",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def in_worker(tree, function, *arguments):
    """Call a function in a new process, as `tools.mutation` does. A fork of this one may hang."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), start_in, (tree,)) as executor:
        return executor.submit(function, *arguments).result()


def start_in(tree):
    trial._tree = tree
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True


def tried(operator, *tests):
    """Try the project's first mutant by an operator."""
    trial._SLACK = 2.0
    mutant = next(mutant for mutant in shuffled_mutants(trial._tree, "counting.py") if mutant.operator == operator)
    return trial.try_mutant(mutant, [Run(each) for each in tests])


def run_after(seconds, kills):
    """Run the tests that are known to take so long, and to have killed so many mutants."""
    trial._seconds.update(seconds)
    trial._kills.update(kills)
    return trial._run(Run(("test_ok.py",)), 60, False)


@pytest.mark.parametrize(
    ("operator", "tests", "result", "test"),
    [
        ("comparison", ("test_ok.py", "test_all.py", "test_ok.py"), FAILED, "test_all.py::test_count"),
        pytest.param("comparison", ("test_ok.py",), SURVIVED, None, marks=pytest.mark.slow),
        pytest.param("deletion", ("test_all.py", "test_ok.py"), TIMED_OUT, None, marks=pytest.mark.slow),
    ],
)
def test_try_mutant(project, operator, tests, result, test):
    source = (project / "counting.py").read_text()
    outcome = in_worker(project, tried, operator, *((each,) for each in tests))
    assert (outcome.result, outcome.test) == (result, test)
    assert (project / "counting.py").read_text() == source


@pytest.mark.slow
def test_tests_that_fail_without_a_mutant_are_an_error(project):
    (project / "test_ok.py").write_text("def test_ok(): assert False\n")
    with pytest.raises(RuntimeError, match="without a mutant: test_ok"):
        in_worker(project, tried, "comparison", ("test_ok.py",))


@pytest.mark.slow
def test_quick_tests_run_first(project):
    (project / "test_ok.py").write_text(
        "import time\n\ndef test_slow(): time.sleep(0.3); assert 0\n\ndef test_quick(): assert 0\n"
    )
    seconds = {"test_ok.py::test_slow": 0.3, "test_ok.py::test_quick": 0.1}
    assert in_worker(project, run_after, seconds, {}) == (FAILED, "test_ok.py::test_quick")
    assert in_worker(project, run_after, seconds, {"test_ok.py::test_slow": 5}) == (FAILED, "test_ok.py::test_slow")


def test_what_is_known_is_not_tried_again():
    mutants = [MUTANT._replace(start=start) for start in range(5)]
    assert pending(mutants, {}, 3) == mutants[:3]
    known = {mutants[0]: Outcome(FAILED, "test", 1.0), mutants[1]: Outcome(NOT_BUILT, None, 1.0)}
    assert pending(mutants, known, 3) == [mutants[2], mutants[3]]
    assert pending(mutants[:2], known, 3) == []


def test_the_last_record_of_a_mutant_counts(tmp_path):
    path = tmp_path / "records.jsonl"
    assert records.read(path) == {}
    records.append(MUTANT, Outcome(SURVIVED, None, 2.0), path)
    records.append(MUTANT, Outcome(FAILED, "test", 1.0), path)
    assert records.read(path) == {MUTANT: Outcome(FAILED, "test", 1.0)}
    records.rewrite(records.read(path), path)
    assert len(path.read_text().splitlines()) == 1
    assert records.read(path) == {MUTANT: Outcome(FAILED, "test", 1.0)}


def test_page(monkeypatch):
    target = TARGETS[0]
    results = (SURVIVED, FAILED, TIMED_OUT, NOT_BUILT)
    mutants = shuffled_mutants(ROOT, target.file)
    outcomes = {mutant: Outcome(result, None, 1.0) for mutant, result in zip(mutants, results, strict=False)}
    page = report.page(outcomes)
    assert f"| `{target.file}` | 3 | 2 | 1 | 66.7% |" in page
    assert f"| `{TARGETS[1].file}` | | | | not yet measured |" in page
    assert "not explained yet" in page
    first = mutants[0]
    reason = report.Reason(first.file, first.code, first.before, first.after, "Why it survives.")
    monkeypatch.setattr(report, "REASONS", [reason])
    assert "Why it survives." in report.page(outcomes)


def test_the_page_shows_the_records_and_a_reason_for_each_survivor():
    outcomes = records.read()
    page = report.page(outcomes)
    assert (ROOT / report.PAGE).read_text() == page, "run python -m tools.mutation --report"
    assert "not explained yet" not in page
    survived = {mutant for mutant, outcome in outcomes.items() if outcome.result == SURVIVED}
    known = {(mutant.file, mutant.code, mutant.before, mutant.after) for mutant in survived}
    assert {entry[:4] for entry in report.REASONS} <= known
