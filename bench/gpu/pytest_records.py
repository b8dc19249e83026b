"""A pytest plugin: the outcome of each test is a record, written when the test ends. It works with and without xdist.

`SEQWARM_RECORDS` names the file of records. Once the processes are ended, `add_unfinished` records the tests that were
running or not run; pytest's `faulthandler_timeout` prints where a test hangs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from .records import TESTS, DeviceRecord, append, read_device_records

_MOST_TRACEBACK = 12000  # characters in a record


def _state_beside(records: Path) -> Path:
    return records.with_suffix(".state")


def _record(test: str, seconds: float, failure: str | None = None, text: str = "") -> DeviceRecord:
    facts = {"traceback": text[-_MOST_TRACEBACK:]} if text else {}
    return DeviceRecord(TESTS, test, "test", "pytest", figures={"seconds": seconds}, facts=facts, failure=failure)


# ---- after the session


def add_unfinished(records: Path) -> None:
    """Records the tests without an outcome, and removes the file beside the records."""
    state = _state_beside(records)
    lines = [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []
    known = {record.case for record in read_device_records(records)[1] if record.stage == TESTS}
    started = {line["started"] for line in lines if "started" in line} - known
    collected = {test for line in lines for test in line.get("collected", ())} - known
    for test in sorted(started):
        append(records, _record(test, 0.0, "running when the time was over"))
    for test in sorted(collected - started):
        append(records, _record(test, 0.0, "not run: the time was over"))
    state.unlink(missing_ok=True)


# ---- hooks. Reports of workers arrive in the main process, which alone has no PYTEST_XDIST_WORKER.


def _write_state(**line: Any) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with _state_beside(Path(os.environ["SEQWARM_RECORDS"])).open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_collection_finish(session: Any) -> None:
    _write_state(collected=[item.nodeid for item in session.items])


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_node_collection_finished(ids: Iterable[str]) -> None:
    _write_state(collected=list(ids))


def pytest_runtest_logstart(nodeid: str) -> None:
    _write_state(started=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        _end_if_the_device_is_lost(report)
    elif report.failed:
        _append(_record(report.nodeid, report.duration, _reason(report), report.longreprtext))
    elif report.when == "call":
        _append(_record(report.nodeid, report.duration))
    elif report.skipped:
        _append(_record(report.nodeid, report.duration, f"skipped: {report.longrepr[-1]}"))


def _append(record: DeviceRecord) -> None:
    append(Path(os.environ["SEQWARM_RECORDS"]), record)


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
