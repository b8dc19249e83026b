"""Tries mutants in a worker process, which has its own copy of the tree.

The worker imports torch and pytest once. Each run of the tests is a fork of the worker, so a mutant costs its tests and
little more. The package under test is imported in the fork only.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from . import builds
from .builds import NotBuilt
from .mutants import FAILED, NOT_BUILT, SURVIVED, TIMED_OUT, Mutant, Outcome, digest
from .targets import Run

_PYTEST = (
    *("-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "--hypothesis-profile", "mutation"),
    *("-m", "not exhaustive and not gpu"),
)
_NOT_COPIED = (".git", ".venv", "build", "reports", "__pycache__", ".*_cache", ".hypothesis", ".benchmarks")
_ENVIRONMENT = {
    "CMAKE_BUILD_PARALLEL_LEVEL": "1",
    "OMP_NUM_THREADS": "1",
    "SEQWARM_EMULATED_AMX": "1",
    "PYTHONDONTWRITEBYTECODE": "1",  # a mutant written in the same second with the same size would not be compiled
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    "TRITON_INTERPRET": "1",
}

#: Seconds that all tests, and CPU seconds that one test may take besides four times those of the unchanged code.
_SLACK, _SLACK_OF_A_TEST = 30.0, 5.0

#: A mutant may allocate without end.
_MEMORY = 16 * 2**30  # bytes

_tree: Path  # this worker's copy
_seconds: dict[str, float] = {}  # of each test without a mutant; tests that were never run are not in it
_kills: Counter[str | None] = Counter()  # mutants that failed each test


def start_worker(root: Path, scratch: Path) -> None:
    """Copy the tree, and import what all tests import, except for the package."""
    global _tree
    _tree = Path(tempfile.mkdtemp(dir=scratch)) / "tree"
    shutil.copytree(root, _tree, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    os.chdir(_tree)
    paths = [str(_tree), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ.update(_ENVIRONMENT, PYTHONPATH=os.pathsep.join(paths))
    sys.dont_write_bytecode = True
    sys.path[:] = [str(_tree), *(path for path in sys.path if path and Path(path).resolve() != root)]
    for module in ("torch._dynamo", "triton.language", "hypothesis"):
        importlib.import_module(module)


def try_mutant(mutant: Mutant, runs: Sequence[Run]) -> Outcome:
    """Run pytest on the mutant until a test fails."""
    result, test, seconds = NOT_BUILT, None, 0.0
    for run in runs:
        limit = _limit(run, mutant.is_compiled)
        started = time.monotonic()
        with suppress(NotBuilt), _applied(mutant):
            result, test = _run(run, limit, mutant.is_compiled)
        seconds += time.monotonic() - started
        if result != SURVIVED:
            _kills[test] += 1
            break
    return Outcome(result, test, round(seconds, 1))


@functools.cache
def _limit(run: Run, is_compiled: bool) -> float:
    """Seconds after which a mutant counts as hanging. The tests must pass on the unchanged tree."""
    if is_compiled:
        builds.install(run.build)
    started = time.monotonic()
    result, test = _run(run, 3600, is_compiled)
    if _durations().exists():  # a run with sanitizers writes none
        for name, seconds in json.loads(_durations().read_text()).items():
            _seconds[name] = max(seconds, _seconds.get(name, 0.0))
        _durations().unlink()
    if result != SURVIVED:
        command = f"pytest {' '.join(run.tests)}"
        raise RuntimeError(f"{command} {result} without a mutant: {test or _log().read_text()}")
    return _SLACK + 4 * (time.monotonic() - started)


def _run(run: Run, limit: float, is_compiled: bool) -> tuple[str, str | None]:
    """Run pytest in a fork. The result, and the test that failed."""
    if is_compiled:
        builds.install(run.build)
    pid = os.fork()
    if pid == 0:
        _become_pytest(run)
    deadline = time.monotonic() + limit
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
        ended, status = os.waitpid(pid, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # also what the tests started and left behind
    if not ended:
        os.waitpid(pid, 0)
    if not ended or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF):
        return TIMED_OUT, None
    if status == 0:
        return SURVIVED, None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", _log().read_text(errors="replace"), re.MULTILINE)
    return FAILED, failed[1] if failed else None


def _become_pytest(run: Run) -> NoReturn:
    status = 1
    try:
        os.setsid()
        sys.stdout = sys.stderr = log = _log().open("w")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os.environ.update(run.environment)
        if run.build == "sanitizers":  # whose library must be loaded before Python
            command = [sys.executable, "-m", "pytest", *_PYTEST, *run.tests]
            os.execve(sys.executable, command, {**os.environ, **builds.sanitizers()})
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        status = int(pytest.main([*_PYTEST, *run.tests], [_LikeliestFirst()]))
    finally:
        sys.stdout.flush()
        os._exit(status)


class _LikeliestFirst:
    """Plugin of pytest: tests that failed on many mutants in little time come first. Limits and writes their times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: _seconds.get(item.nodeid, 0.0) / (1 + _kills[item.nodeid]))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if nodeid in _seconds:
            signal.setitimer(signal.ITIMER_PROF, _SLACK_OF_A_TEST + 4 * _seconds[nodeid])  # its signal ends the process

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        _durations().write_text(json.dumps(self.seconds))


def _log() -> Path:
    return _tree.parent / "log"


def _durations() -> Path:
    return _tree.parent / "durations.json"


@contextmanager
def _applied(mutant: Mutant) -> Iterator[None]:
    path = _tree / mutant.file
    source = path.read_text()
    assert digest(source) == mutant.source, f"{mutant.file} changed while mutants were tried"
    unchanged = builds.module().read_bytes() if mutant.is_compiled else None
    path.write_text(mutant.apply(source))
    try:
        yield
    finally:
        path.write_text(source)
        if unchanged is not None:
            builds.module().write_bytes(unchanged)
