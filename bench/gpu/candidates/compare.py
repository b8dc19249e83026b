"""Each candidate beside main: first its results, in processes with a time limit, then the times of both in turns."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
_ENVIRONMENT = {"SEQWARM_SPECIALIZED": "0"}  # candidates change kernels in Triton, so these serve every call
_LAST_CALL = 25.0  # seconds for a start of torch and one call
_TOGETHER = max(2, (os.cpu_count() or 4) - 1)  # processes


def compare(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    candidates = read_candidates()
    environment = _ENVIRONMENT | ({"TRITON_INTERPRET": "1"} if tiny else {})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trees = {MAIN: ROOT} | {each.name: each.write_tree(folder / each.name) for each in candidates}
        workers = {
            name: stack.enter_context(Worker(tree, folder / f"{name}.log", environment)) for name, tree in trees.items()
        }
        with ThreadPoolExecutor(_TOGETHER) as pool:  # all that compiles
            prepared = {each.name: pool.submit(_prepare, workers[each.name], [each], tiny) for each in candidates}
            prepared[MAIN] = pool.submit(_prepare, workers[MAIN], candidates, tiny)
            checks = {
                each.name: [
                    pool.submit(check, [group], trees[each.name]) for group in each.cases[: 1 if tiny else None]
                ]
                for each in candidates
            }
        for candidate in tqdm(candidates, desc=STAGE, unit="candidate"):
            name = candidate.name
            outcomes = [prepared[MAIN].result(), prepared[name].result(), *(each.result() for each in checks[name])]
            failure = next((outcome for outcome in outcomes if outcome is not None), None)
            if failure is None:
                _time(recorder, candidate, workers[MAIN], workers[name], tiny)
            else:
                recorder.add(DeviceRecord(STAGE, "results", candidate.work, name, failure=failure))


def check(groups: Iterable[str], tree: Path, seconds: float = _CHECK_SECONDS) -> str | None:
    """Why the results of a tree are not right, or None. Without an answer in time they are not."""
    groups = list(groups)
    command = [sys.executable, "-m", "bench.gpu.candidates.check", str(seconds - _LAST_CALL), *groups]
    environment = _ENVIRONMENT | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    program = Program(command, tree / f"{groups[0]}.log", tree, **environment)
    outcome = program.wait_until(time.monotonic() + seconds)
    return None if program.code == 0 else outcome


def _prepare(worker: Worker, candidates: Iterable[Candidate], tiny: bool) -> str | None:
    """Compiles what is timed. Returns why this failed, or None."""
    try:
        for candidate in candidates:
            for number in range(len(timed(candidate.cases, tiny))):
                worker.time(candidate.work, candidate.cases, number)
    except RuntimeError as error:
        return explain(error)
    return None


def _time(recorder: Recorder, candidate: Candidate, main: Worker, changed: Worker, tiny: bool) -> None:
    for number, call in enumerate(timed(candidate.cases, tiny)):
        key = STAGE, call.case(), candidate.work, candidate.name
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
        recorder.add(
            DeviceRecord(*key, "a", own.median, own.low, own.high, figures=figures, facts=call.problem.facts())
        )


def _of_rounds(timings: Iterable[Timing]) -> Timing:
    """Medians of the rounds' medians and quartiles."""
    return Timing(*(median(values) for values in list(zip(*timings, strict=True))[:3]))


def speeds(records: DeviceRecords, name: str) -> list[float]:
    """The speed of a candidate at each size, relative to main."""
    found = records.of_stages(STAGE).all
    return [record.figures["speed"] for record in found if record.implementation == name and record.median_ms]
