"""Training runs, each in a process of its own; what is finished is never trained again."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from seqwarm_kernels.files import write_atomically

from ..programs import Program
from .plan import PACKAGE, SPEED, Run
from .scales import Scale
from .script import DIVERGED, SCRIPT

ROOT = Path(__file__).parents[2]
FINISHED = "finished.json"  #: in a run's folder, written last


class OutOfTime(Exception):
    """The minutes given are over; the next call goes on from the last checkpoint."""


class RunFailed(Exception):
    """A run ended with an error."""


@dataclass(frozen=True)
class Outcome:
    """How a run's process ended."""

    run: Run
    folder: Path
    failure: str | None  #: the last line it printed, if it could not be trained with its attention
    busy: float | None = None  #: processes that wanted a core when it began: the system's load average of a minute


class Runner:
    """
    Args:
        scale: sizes.
        text: files and folders.
        out: of all runs.
        minutes: until the runs are stopped, to be gone on with later; None: no limit.
    """

    def __init__(self, scale: Scale, text: list[Path], out: Path, minutes: float | None = None) -> None:
        self.scale, self.text, self.out = scale, text, out
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    def folder(self, run: Run) -> Path:
        return self.out / "runs" / run.name

    def run_all(self, runs: Sequence[Run], title: str) -> list[Outcome]:
        """One after another, in this order.

        Raises:
            OutOfTime: before all of them were finished.
            RunFailed: one of this package's attention, which should not.
            ValueError: a folder holds a run of other settings.
        """
        outcomes = []
        with tqdm(runs, desc=title, unit="run") as bar:
            for run in bar:
                bar.set_postfix_str(run.name)
                outcomes.append(self._outcome(run) or self._train(run))
        return outcomes

    def finished(self, runs: Sequence[Run]) -> list[Outcome]:
        """Those of `runs` that are, without training any."""
        return [outcome for run in runs if (outcome := self._outcome(run)) is not None]

    def _outcome(self, run: Run) -> Outcome | None:
        path = self.folder(run) / FINISHED
        if not path.exists():
            return None
        stored = json.loads(path.read_text())
        if stored["arguments"] != self._comparable(run):
            raise ValueError(f"{path.parent} holds a run of other settings: name a new folder")
        return Outcome(run, path.parent, stored["failure"], stored["busy"])

    def _comparable(self, run: Run) -> list[str]:
        """Independent of where text and runs lie."""
        return run.arguments(self.scale, [], Path())

    def _train(self, run: Run) -> Outcome:
        folder = self.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        log = folder.with_name(folder.name + ".log")
        code, last = self._process(run, log)
        if code is None:
            raise OutOfTime(f"stopped in {run.name}")
        failure = None if code in (0, DIVERGED) else last
        if failure is not None and run.attention == PACKAGE:  # another one's is a result
            raise RunFailed(f"{run.name} failed: {failure}; all that it printed: {log}")
        stored = {"arguments": self._comparable(run), "failure": failure, "busy": busy}
        write_atomically(folder / FINISHED, json.dumps(stored).encode())
        return Outcome(run, folder, failure, busy)

    def _process(self, run: Run, log: Path) -> tuple[int | None, str]:
        """Exit status, None where time was over; what it printed last."""
        arguments = run.arguments(self.scale, self.text, self.out)
        program = ["-m", "bench.training.with_attention", run.attention] if run.experiment == SPEED else [str(SCRIPT)]
        if self._end is not None and time.monotonic() > self._end:
            raise OutOfTime(f"stopped before {run.name}")
        process = Program([sys.executable, *program, *arguments], log, ROOT)
        try:
            last = process.wait_until(float("inf") if self._end is None else self._end)
        except BaseException:  # Ctrl-C: it has a session of its own
            process.wait_until(0.0)
            raise
        return process.code, last
