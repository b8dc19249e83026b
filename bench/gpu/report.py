"""Tables of a GPU run: times of every stage, goals, and what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from experiments import gpu as training

from ..alibi_attention import report as attention
from ..allocator import gpu as allocator
from ..common.goals import Goal, goals_table
from ..common.records import figures_text, markdown
from ..resize_batch import report as resizing
from .records import STEPS, TESTS, DeviceRecord, DeviceRecords, gigabytes_per_second, teraflops

_MOST_FAILURES = 7


def device_report(records: DeviceRecords) -> str:
    """Markdown. What matters most comes last, since a terminal shows the end."""
    stages = dict.fromkeys(each.stage for each in records.all if each.failure is None and each.stage != TESTS)
    texts = [*(_stage_table(records, stage) for stage in stages), goals_table(device_goals(records))]
    texts.append("\n".join([*passed_and_failed(records), *failures(records)]))
    return "\n\n".join(text for text in texts if text)


def device_goals(records: DeviceRecords) -> Iterator[Goal]:
    for topic in (attention, resizing, allocator, training):
        yield from topic.device_goals(records)


def _stage_table(records: DeviceRecords, stage: str) -> str:
    rows = []
    for each in records.of_stages(stage).all:
        if each.failure is None:
            rates = {"TFLOP/s": teraflops(each), "GB/s": gigabytes_per_second(each)}
            figures = figures_text({**{name: rate for name, rate in rates.items() if rate}, **each.figures})
            case = each.case if each.inputs == "a" else f"{each.case}, inputs {each.inputs}"
            rows.append([case, each.work, each.implementation, each.time_text(), figures])
    return markdown([stage, "work", "implementation", "ms", "figures"], rows)


def passed_and_failed(records: DeviceRecords) -> Iterator[str]:
    """How many steps and tests passed, and a line for each step that did not."""
    for stage in (STEPS, TESTS):
        outcomes = Counter(_outcome(record) for record in records.of_stages(stage).all)
        if outcomes:
            yield f"- {stage}: {', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())}"
    for record in records.of_stages(STEPS).all:
        if record.failure is not None:
            yield f"- FAILED {record.case}: {record.failure[:150]}"


def _outcome(record: DeviceRecord) -> str:
    if record.failure is None:
        return "passed"
    return next((word for word in ("skipped", "not run") if record.failure.startswith(word)), "failed")


def failures(records: DeviceRecords) -> Iterator[str]:
    """A line for each reason."""
    reasons: dict[str, list[DeviceRecord]] = {}
    for record in records.all:
        if record.failure is not None and record.stage != STEPS and _outcome(record) == "failed":
            reasons.setdefault(f"{record.implementation}: {record.failure}", []).append(record)
    for reason, failed in [*reasons.items()][:_MOST_FAILURES]:
        yield f"- failed {len(failed)}x, first {failed[0].stage} {failed[0].case} {failed[0].work}, {reason[:150]}"
    if len(reasons) > _MOST_FAILURES:
        yield f"- and {len(reasons) - _MOST_FAILURES} other reasons: see the records"
