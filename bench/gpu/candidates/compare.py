"""Each candidate beside main: first its results, in a process of its own with a time limit, then times in turns."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from ...common.processes import Program
from ...common.records import ROOT
from ...common.timing import Timing
from ..records import DeviceRecord, DeviceRecords, Recorder, explain
from .cases import timed
from .patches import Candidate, read_candidates
from .worker import Worker

STAGE, MAIN = "candidates", "main"
ROUNDS = 3  #: of both trees in turns
WINS = 1.03  #: a change goes in from this speed on, at every size
_CHECK_SECONDS = 60.0
_TOGETHER = max(2, (os.cpu_count() or 4) - 1)  # processes


def compare(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    candidates = read_candidates()
    environment = {"TRITON_INTERPRET": "1"} if tiny else {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(_TOGETHER) as pool:
        folder = Path(name)
        trees = [candidate.write_tree(folder / candidate.name) for candidate in candidates]
        checks = pool.map(lambda each, tree: check(each.cases[: 1 if tiny else None], tree), candidates, trees)
        failures = list(checks)
        with Worker(ROOT, folder / "main.log", environment) as main:
            for candidate, tree, failure in zip(candidates, trees, tqdm(failures, desc=STAGE), strict=True):
                if failure is not None:
                    key = STAGE, "results", candidate.work, candidate.name
                    recorder.add(DeviceRecord(*key, failure=failure))
                    continue
                with Worker(tree, folder / f"{candidate.name}.log", environment) as changed:
                    _time(recorder, candidate, main, changed, tiny)


def check(groups: Iterable[str], tree: Path, seconds: float = _CHECK_SECONDS) -> str | None:
    """Why the results of a tree are not right, or None. Without an answer in time they are not."""
    command = [sys.executable, "-m", "bench.gpu.candidates.check", *groups]
    environment = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    program = Program(command, tree / "check.log", tree, **environment)
    outcome = program.wait_until(time.monotonic() + seconds)
    return None if program.code == 0 else outcome


def _time(recorder: Recorder, candidate: Candidate, main: Worker, changed: Worker, tiny: bool) -> None:
    for number, problem in enumerate(timed(candidate.cases, tiny)):
        key = STAGE, problem.case(), candidate.work, candidate.name
        if recorder.out_of_time() or recorder.has(*key, "a"):
            continue
        try:
            rounds = [
                [worker.time(candidate.work, candidate.cases, number) for worker in (main, changed)]
                for _ in range(ROUNDS)
            ]
        except RuntimeError as error:
            recorder.add(DeviceRecord(*key, failure=explain(error)))
            return
        beside, own = (_of_rounds(timings) for timings in zip(*rounds, strict=True))
        figures = {f"{MAIN}_ms": beside.median, "speed": beside.median / own.median}
        recorder.add(DeviceRecord(*key, "a", own.median, own.low, own.high, figures=figures, facts=problem.facts()))


def _of_rounds(timings: Iterable[Timing]) -> Timing:
    """Medians of the rounds' medians and quartiles."""
    return Timing(*(median(values) for values in list(zip(*timings, strict=True))[:3]))


def speeds(records: DeviceRecords, name: str) -> list[float]:
    """The speed of a candidate at each size, relative to main."""
    found = records.of_stages(STAGE).all
    return [record.figures["speed"] for record in found if record.implementation == name and record.median_ms]
