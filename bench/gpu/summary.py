"""The table at the end of a GPU run: goals, times, failures, and which predictions held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from experiments import gpu as training

from ..alibi_attention import hopper
from ..alibi_attention import report as attention
from ..allocator import gpu as allocator
from ..common.goals import Goal
from ..resize_batch import report as resizing
from .predictions import prediction_lines
from .records import STEPS, TESTS, DeviceRecord, DeviceRecords

_MOST_FAILURES = 7


def summary(records: DeviceRecords) -> Iterator[str]:
    """The lines of the table."""
    for goal in device_goals(records):
        if goal.value is None:
            continue
        mark = {True: "ok  ", False: "MISS", None: "    "}[goal.reached()]
        yield f"{mark} {goal.what:<62} {goal.value_text():>16}  {goal.goal_text():<14} {goal.where}"
    yield from attention.summary_lines(records)
    for stage in ("host", "packed", "decoding", "tiles", "tuned", "diagnostics"):
        yield from _times(records, stage)
    yield from hopper.summary_lines(records)
    yield from passed_and_failed(records)
    yield from failures(records)
    yield from prediction_lines(records)


def passed_and_failed(records: DeviceRecords) -> Iterator[str]:
    """How many steps and tests passed, and a line for each step that did not."""
    for stage in (STEPS, TESTS):
        outcomes = Counter(_outcome(record) for record in records.of_stages(stage).all)
        if outcomes:
            yield f"{stage}: {', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())}"
    for record in records.of_stages(STEPS).all:
        if record.failure is not None:
            yield f"FAILED {record.case}: {record.failure[:150]}"


def _outcome(record: DeviceRecord) -> str:
    if record.failure is None:
        return "passed"
    return next((word for word in ("skipped", "not run") if record.failure.startswith(word)), "failed")


def device_goals(records: DeviceRecords) -> Iterator[Goal]:
    for topic in (attention, resizing, allocator, training):
        yield from topic.device_goals(records)


def _times(records: DeviceRecords, stage: str) -> Iterator[str]:
    """A line for each case, with milliseconds of every implementation and kind of work."""
    cases: dict[str, dict[str, list[str]]] = {}
    for record in records.of_stages(stage).all:
        if record.median_ms is not None:
            times = cases.setdefault(record.case, {}).setdefault(record.implementation, [])
            times.append(f"{record.work} {record.median_ms:.3g}")
    for case, implementations in cases.items():
        texts = [f"{name} ({', '.join(times)})" for name, times in implementations.items()]
        yield f"{stage} {case}, ms: {'; '.join(texts)}"


def failures(records: DeviceRecords) -> Iterator[str]:
    """A line for each reason."""
    reasons: dict[str, list[DeviceRecord]] = {}
    for record in records.all:
        if record.failure is not None and record.stage != STEPS and _outcome(record) == "failed":
            reasons.setdefault(f"{record.implementation}: {record.failure}", []).append(record)
    for reason, failed in [*reasons.items()][:_MOST_FAILURES]:
        yield f"failed {len(failed)}x, first {failed[0].stage} {failed[0].case} {failed[0].work}, {reason[:150]}"
    if len(reasons) > _MOST_FAILURES:
        yield f"and {len(reasons) - _MOST_FAILURES} other reasons: see the records"
