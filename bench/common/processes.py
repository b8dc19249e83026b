"""Programs that run as child processes, each with its own log and time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path


def run_program(
    command: list[str], log: Path, cwd: Path, until: float = float("inf"), **environment: str
) -> tuple[int | None, str]:
    """Run a program, append its output to `log`, and kill it when time.monotonic() reaches `until`.

    Returns:
        The exit code, or None if the program was killed; and the same with the last line of output, as text.
    """
    with log.open("a") as file:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            start_new_session=True,  # so that killing the group also ends the processes it started
        )
    code = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(max(0.0, until - time.monotonic()))
    finally:  # also after Ctrl-C, which does not reach the group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1][-160:] if lines else "no output"
    return code, f"stopped when its time was over; last: {last}" if code is None else f"exit {code}: {last}"
