"""Training runs, each in a process of its own; what is finished is never trained again."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from seqwarm_kernels.utils.files import write_atomically

from ..common.processes import Program
from ..common.records import environment
from .plan import PACKAGE, SPEED, Run
from .scales import Scale
from .script import DIVERGED, SCRIPT

ROOT = Path(__file__).parents[2]
FINISHED = "finished.json"  #: in a run's folder, written last

#: What an attention raises that cannot do it: a result. Anything else may pass, and is tried again.
_REFUSAL = "NotImplementedError"


class OtherRun(ValueError):
    """A folder holds a run of other settings or another text."""


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
    busy: float | None = None  #: the system's load average over the minute before it, in which another run may end
    environment: dict[str, Any] | None = field(default=None, compare=False)  #: of the machine; runs of old have none


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
        self._tokens: str | None = None  # the text and tokenizer of all runs
        self._told = False

    def folder(self, run: Run) -> Path:
        return self.out / "runs" / run.name

    def run_all(self, runs: Sequence[Run], title: str) -> list[Outcome]:
        """One after another, in this order.

        Raises:
            OutOfTime: before all of them were finished.
            RunFailed: one of this package's attention, which should not.
            OtherRun: a folder holds a run of other settings or another text.
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
            raise OtherRun(f"{path.parent} holds a run of other settings: name a new folder")
        if stored["failure"] is not None and _REFUSAL not in stored["failure"]:
            return None
        self._compare_text(path.parent, stored.get("tokens"))
        return Outcome(run, path.parent, stored["failure"], stored["busy"], stored.get("environment"))

    def _compare_text(self, folder: Path, tokens: str | None) -> None:
        """Among runs; and by its place with the text of now, which is not read for that."""
        if tokens is not None and self._tokens not in (None, tokens):
            raise OtherRun(f"{folder} holds a run of another text than others in {self.out}: name a new folder")
        self._tokens = tokens or self._tokens
        text, given = _config(folder).get("text"), [str(path) for path in self.text]
        if given and text and text != given and not self._told:
            self._told = True
            print(
                f"{self.out} holds runs of the text in {', '.join(text)}, taken as they are; given: {', '.join(given)}"
            )

    def check_time(self) -> None:
        """
        Raises:
            OutOfTime: the minutes are over.
        """
        if self._end is not None and time.monotonic() > self._end:
            raise OutOfTime("stopped between runs")

    def _comparable(self, run: Run) -> list[str]:
        """Independent of where text and runs lie."""
        return run.arguments(self.scale, [], Path())

    def _train(self, run: Run) -> Outcome:
        folder = self.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        log = folder.with_name(folder.name + ".log")
        code, last = self._process(run, log)
        if code is None and self._end is not None and time.monotonic() >= self._end:
            raise OutOfTime(f"stopped in {run.name}")
        failure = None if code in (0, DIVERGED) else last
        told = f"{run.name} failed: {failure}; all that it printed: {log}"
        if failure is not None and (run.attention == PACKAGE or code is None):
            raise RunFailed(told)
        outcome = Outcome(run, folder, failure, busy, environment_of_runs())
        if failure is None or _REFUSAL in failure:
            self._finish(outcome)
        else:
            print(f"{told}; the next call tries again")
        return outcome

    def _finish(self, outcome: Outcome) -> None:
        """Keep of its folder what is read again."""
        run, folder = outcome.run, outcome.folder
        tokens = _config(folder).get("tokens") or None
        self._compare_text(folder, tokens)
        stored = {
            "arguments": self._comparable(run),
            "failure": outcome.failure,
            "busy": outcome.busy,
            "tokens": tokens,
            "environment": outcome.environment,
        }
        write_atomically(folder / FINISHED, json.dumps(stored).encode())
        for name in ("checkpoint.pt", *([] if run.keeps_model else ["model.pt"])):
            (folder / name).unlink(missing_ok=True)

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


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return json.loads(path.read_text()) if path.exists() else {}


@functools.cache
def environment_of_runs() -> dict[str, Any]:
    """Of this machine; without Triton a little less of a GPU's."""
    if not torch.cuda.is_available():
        return environment()
    try:
        from ..gpu.records import device_environment
    except ImportError:
        return {**environment(), "cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name()}
    return {name: value for name, value in device_environment().items() if name != "date"}
