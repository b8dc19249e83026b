"""Programs that run as child processes, each with its own log and time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path


class Program:
    """A child process that starts at once and appends its output to `log`."""

    def __init__(self, command: list[str], log: Path, cwd: Path, **environment: str) -> None:
        self._log = log
        self.code: int | None = None
        with log.open("a") as file:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                start_new_session=True,  # so that killing the group also ends the processes it started
            )

    def wait_until(self, moment: float) -> str:
        """Waits for the process, and kills it when time.monotonic() reaches `moment`.

        Returns:
            The exit code and the last line of output, or that there is no exit code.
        """
        try:
            self.code = self._process.wait(max(0.0, moment - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._end_group()
            self._process.wait()
            return f"stopped when its time was over; last: {self._last_line()}"
        self._end_group()
        return f"exit {self.code}: {self._last_line()}"

    def _end_group(self) -> None:
        """Ends the process and those that it has started, also if it ended before them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _last_line(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[-160:] if lines else "no output"
