"""Training runs, each in its own process. A finished run is never trained again."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
from tqdm.auto import tqdm

from bench.common.processes import run_program
from bench.common.records import ROOT, environment
from bench.gpu.records import device_environment
from seqwarm_kernels.utils.files import write_atomically

from .plan import PACKAGE, SPEED, RunPlan
from .reading import read_validations
from .scales import Scale

SCRIPT = ROOT / "examples" / "train_gpt2" / "train.py"
FINISHED = "finished.json"  #: in a run's folder, written last

#: Raised by an attention that does not support the run. This is a result. After any other failure the run is retried.
_UNSUPPORTED = "NotImplementedError"


class OtherRun(ValueError):
    """A folder holds a run with other settings or another text."""


class OutOfTime(Exception):
    """The given minutes are over. The next call resumes from the last checkpoint."""


class RunFailed(Exception):
    """A run ended with an error."""


@functools.cache
def load_script() -> SimpleNamespace:
    """The modules of the training script: `model`, `text` and `train`.

    They import each other by these names, as when the script is started. Other modules may have the same names, so the
    names are in `sys.modules` only during the import.
    """
    names = ("model", "text", "train")  # each imports only modules before it
    others = {name: sys.modules.get(name) for name in names}
    loaded = {}
    try:
        for name in names:
            specification = importlib.util.spec_from_file_location(f"train_gpt2_{name}", SCRIPT.with_name(f"{name}.py"))
            assert specification is not None
            assert specification.loader is not None
            loaded[name] = importlib.util.module_from_spec(specification)
            sys.modules[specification.name] = sys.modules[name] = loaded[name]  # dataclasses and pickle use the first
            specification.loader.exec_module(loaded[name])
    finally:
        for name, module in others.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
    return SimpleNamespace(**loaded)


@dataclass(frozen=True)
class RunOutcome:
    """How the process of a run ended."""

    run: RunPlan
    folder: Path
    failure: str | None  #: the last line of output, if the run could not be trained with its attention
    busy: float | None = None  #: the system's load average just before the run, perhaps from another run's end
    environment: dict[str, Any] | None = field(default=None, compare=False)  #: of the machine; None for old runs


class Runner:
    """Trains runs that are not finished, and reads those that are.

    Args:
        scale: Sizes of all runs.
        text: Files and folders to train on.
        out: Folder of all runs.
        minutes: Runs are stopped after this time, and resumed by a later call. None: no limit.
    """

    def __init__(self, scale: Scale, text: list[Path], out: Path, minutes: float | None = None) -> None:
        self.scale, self.text, self.out = scale, text, out
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._tokens: str | None = None  # identifies text and tokenizer, the same for all runs
        self._has_warned = False

    def folder(self, run: RunPlan) -> Path:
        return self.out / "runs" / run.name

    def run_all(self, runs: Sequence[RunPlan], title: str) -> list[RunOutcome]:
        """Train `runs` one after another, in this order.

        Raises:
            OutOfTime: The time was over before all runs were finished.
            RunFailed: A run with this package's attention failed, or a program could not be started.
            OtherRun: A folder holds a run with other settings or another text.
        """
        print(f"{title}: {self.estimate(runs)}")
        outcomes = []
        with tqdm(runs, desc=title, unit="run") as bar:
            for run in bar:
                bar.set_postfix_str(run.name)
                outcomes.append(self._outcome(run) or self._train(run))
        return outcomes

    def finished(self, runs: Sequence[RunPlan]) -> list[RunOutcome]:
        """The outcomes of those `runs` that are finished. Trains nothing."""
        return [outcome for run in runs if (outcome := self._outcome(run)) is not None]

    def estimate(self, runs: Sequence[RunPlan]) -> str:
        """What is left of `runs`, and how long that trains at the speed of those that are finished."""
        finished = self.finished(runs)
        seconds = [read_validations(outcome.folder)[-1].seconds for outcome in finished if outcome.failure is None]
        left = len(runs) - len(finished)
        text = f"{left} of {len(runs)} runs left, {left * self.scale.total_tokens / 1e6:.1f} M tokens"
        return f"{text}, about {left * mean(seconds) / 60:.0f} minutes of training" if seconds and left else text

    def _outcome(self, run: RunPlan) -> RunOutcome | None:
        path = self.folder(run) / FINISHED
        if not path.exists():
            return None
        stored = json.loads(path.read_text())
        if stored["arguments"] != self._comparable(run):
            raise OtherRun(f"{path.parent} holds a run of other settings: name a new folder")
        if stored["failure"] is not None and _UNSUPPORTED not in stored["failure"]:
            return None
        self._compare_text(path.parent, stored.get("tokens"))
        return RunOutcome(run, path.parent, stored["failure"], stored["busy"], stored.get("environment"))

    def _compare_text(self, folder: Path, tokens: str | None) -> None:
        """Check that all runs share one text. Warn if its path is not the given one, which is not read for that."""
        if tokens is not None and self._tokens not in (None, tokens):
            raise OtherRun(f"{folder} holds a run of another text than others in {self.out}: name a new folder")
        self._tokens = tokens or self._tokens
        text, given = _config(folder).get("text"), [str(path) for path in self.text]
        if given and text and text != given and not self._has_warned:
            self._has_warned = True
            print(f"{self.out} holds runs of the text in {', '.join(text)}, which are used; given: {', '.join(given)}")

    def check_time(self) -> None:
        """Raise if the time is over.

        Raises:
            OutOfTime: The given minutes are over.
        """
        if self._end is not None and time.monotonic() > self._end:
            raise OutOfTime("stopped between runs")

    def _comparable(self, run: RunPlan) -> list[str]:
        """The arguments without the paths of text and runs."""
        return run.arguments(self.scale, [], Path())

    def _train(self, run: RunPlan) -> RunOutcome:
        folder = self.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        log = folder.with_name(folder.name + ".log")
        code, last = self._process(run, log)
        if code is None and self._end is not None and time.monotonic() >= self._end:
            raise OutOfTime(f"stopped in {run.name}")
        failure = None if code in (0, load_script().train.DIVERGED) else last
        message = f"{run.name} failed: {failure}; all output: {log}"
        if failure is not None and (run.attention == PACKAGE or code is None):
            raise RunFailed(message)
        outcome = RunOutcome(run, folder, failure, busy, environment_of_runs())
        if failure is None or _UNSUPPORTED in failure:
            self._finish(outcome)
        else:
            print(f"{message}; the next call tries again")
        return outcome

    def _finish(self, outcome: RunOutcome) -> None:
        """Write FINISHED, and delete the files that are not read again."""
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

    def _process(self, run: RunPlan, log: Path) -> tuple[int | None, str]:
        """Exit status, or None if the process was stopped, and the last line of output."""
        arguments = run.arguments(self.scale, self.text, self.out)
        program = ["-m", "experiments.with_attention", run.attention] if run.experiment == SPEED else [str(SCRIPT)]
        if self._end is not None and time.monotonic() > self._end:
            raise OutOfTime(f"stopped before {run.name}")
        until = float("inf") if self._end is None else self._end
        return run_program([sys.executable, *program, *arguments], log, ROOT, until)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return json.loads(path.read_text()) if path.exists() else {}


@functools.cache
def environment_of_runs() -> dict[str, Any]:
    """The environment of this machine."""
    if not torch.cuda.is_available():
        return environment()
    return {name: value for name, value in device_environment().items() if name != "date"}
