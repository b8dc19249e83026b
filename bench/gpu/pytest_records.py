"""A pytest plugin: the outcome of each test is a record, written when the test ends. It works with and without xdist.

`SEQWARM_RECORDS` names the file of records. Tests that are running or not run when the processes are ended have records
that say so; pytest's `faulthandler_timeout` prints where a test hangs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from .records import TESTS, DeviceRecord, append

_MOST_TRACEBACK = 12000  # characters in a record
_WORKER = "PYTEST_XDIST_WORKER" in os.environ  # reports of workers arrive in the main process
_collected: set[str] = set()


def _record(test: str, failure: str | None, seconds: float = 0.0, text: str = "") -> None:
    """A later record of a test replaces an earlier one."""
    facts = {"traceback": text[-_MOST_TRACEBACK:]} if text else {}
    record = DeviceRecord(TESTS, test, "test", "pytest", figures={"seconds": seconds}, facts=facts, failure=failure)
    if not _WORKER:
        append(Path(os.environ["SEQWARM_RECORDS"]), record)


def _collect(tests: Iterable[str]) -> None:
    for test in tests:
        if test not in _collected:  # each worker of xdist collects all
            _collected.add(test)
            _record(test, "not run: the time was over")


def pytest_collection_finish(session: Any) -> None:
    _collect(item.nodeid for item in session.items)


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_node_collection_finished(ids: Iterable[str]) -> None:
    _collect(ids)


def pytest_runtest_logstart(nodeid: str) -> None:
    _record(nodeid, "running when the time was over")


def pytest_runtest_logreport(report: Any) -> None:
    if _WORKER:
        _end_if_the_device_is_lost(report)
    elif report.failed:
        _record(report.nodeid, _reason(report), report.duration, report.longreprtext)
    elif report.skipped:
        _record(report.nodeid, f"skipped: {report.longrepr[-1]}", report.duration)
    elif report.when == "call":
        _record(report.nodeid, None, report.duration)


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash else report.longreprtext
    return f"{report.when}: {next(iter(message.splitlines()), '')}"[:300]


def _end_if_the_device_is_lost(report: Any) -> None:
    """After an illegal access every CUDA call of this process fails. xdist starts another worker."""
    if report.failed and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            time.sleep(1)  # the report is still on its way
            os._exit(3)
