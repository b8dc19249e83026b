"""On a GPU: a compiled GPT-2 of 52 million parameters at full length, and with warmup, to the baseline's final loss."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from bench.common.goals import Goal
from bench.gpu.records import DeviceRecord, DeviceRecords, Recorder, explain

from .command import standard_library_folder
from .plan import TIME, RunPlan, middle_peak
from .results import Result, time_results
from .running import OutOfTime, RunFailed, Runner
from .scales import H200, TOY, Scale

STAGE, WORK = "training", "to one loss"
BASELINE = "full length, compiled"
WARMUP = "warmup, steps of fewer tokens, compiled"
SMALL_BATCH = "full length, batches of fewer rows, compiled"  #: about as many steps as with warmup
EAGER_WARMUP = "warmup, steps of fewer tokens"  #: of an earlier run, beside a baseline that was eager too
_PACKAGES = ("torch", "transformers")  #: whose sources are trained on, beside Python's own: some 30 million tokens
#: Eager runs took 32 and 76 seconds on an H200, since short steps waited for the host.
_DEVICE = replace(H200, total_tokens=30_000_000, step_size=64, compile=True)
_TINY = replace(
    TOY, vocab_size=300, seq_length=64, min_seq_length=16, step_size=16, total_tokens=4000, validations=4,
    validation_tokens=1024,
)  # fmt: skip


def arms(scale: Scale) -> dict[str, RunPlan]:
    full = RunPlan(TIME, 0.0, middle_peak(scale), scale.batch_size, 0)
    warm = replace(full, duration=max(scale.durations))
    return {BASELINE: full, WARMUP: warm, SMALL_BATCH: replace(full, batch_size=scale.batch_size * 10 // 32)}


def to_one_loss(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """One run after another. Each is recorded when it ends, beside the baseline."""
    scale = _TINY if tiny else _DEVICE
    case = f"GPT-2 {scale.size}, {scale.total_tokens / 1e6:g} M tokens of Python sources"
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        text = [Path(__file__).parent] if tiny else [standard_library_folder(out), *_sources(out)]
        runner = Runner(scale, text, out, recorder.seconds_left() / 60)
        outcomes = []
        for arm, run in tqdm(arms(scale).items(), desc=STAGE, unit="run"):
            try:
                outcomes += runner.run_all([run], arm)
            except (OutOfTime, RunFailed) as error:
                recorder.add(DeviceRecord(STAGE, case, WORK, arm, failure=explain(error)))
                continue
            recorder.add(_record(case, arm, time_results(outcomes, scale.seq_length)[-1]))


def _sources(out: Path) -> Iterator[Path]:
    """Copies of the Python files of installed packages, without the libraries that lie beside them."""
    for package in _PACKAGES:
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            continue
        root = Path(found.origin).parent
        for path in root.rglob("*.py"):
            copy = out / package / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
        yield out / package


def _record(case: str, arm: str, result: Result) -> DeviceRecord:
    figures = {name: value for name, value in result.figures.items() if isinstance(value, (int, float))}
    return DeviceRecord(STAGE, case, WORK, arm, figures=figures, facts={"curve": result.figures["curve"]})


def device_goals(records: DeviceRecords) -> Iterator[Goal]:
    for arm in (WARMUP, EAGER_WARMUP):
        yield Goal(f"GPT-2 52m, {arm}, time to the baseline's loss", 1.5, sooner(records, arm, "seconds"), "x")


def sooner(records: DeviceRecords, arm: str, unit: str) -> float | None:
    """How many times sooner an arm reaches the final loss of the baseline, in "seconds" or in "tokens"."""
    found = {record.implementation: record.figures for record in records.of_stages(STAGE).all}
    return found.get(arm, {}).get(f"sooner_in_{unit}")
