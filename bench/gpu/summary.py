"""The short table at the end of a run on a GPU: figures with their goals, and what failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..alibi_attention.gpu import BOTH, FORWARD
from ..alibi_attention.peers import CUDNN, FLASH, FLEX
from ..common.goals import Goal, goals
from .lookup import OURS, OURS_NO_SKIP, Records
from .records import DeviceRecord

_MOST_FAILURES = 7


def summary(found: Iterable[DeviceRecord]) -> Iterator[str]:
    records = Records(found)
    for goal in goals(records):
        yield line(goal)
    yield from lengths(records)
    yield from other(records)
    yield from failures(records)


def value(goal: Goal) -> str:
    return "not yet measured" if goal.value is None else f"{goal.value:.4g} {goal.unit}".strip()


def wanted(goal: Goal) -> str:
    return "" if goal.goal is None else f"{'≤' if goal.at_most else '≥'} {goal.goal:g} {goal.unit}".strip()


def line(goal: Goal) -> str:
    mark = {True: "ok  ", False: "MISS", None: "    "}[goal.reached()]
    return f"{mark} {goal.what:<62} {value(goal):>16}  {wanted(goal):<14} {goal.where}"


def lengths(records: Records) -> Iterator[str]:
    """Causal, forward and both, ours in ms and the time of others as a multiple of it."""
    peers = {"no skip": OURS_NO_SKIP, "flex": FLEX.name, "flash": FLASH.name, "cudnn": CUDNN.name}
    cases = sorted(
        {_case(r) for r in records.each(OURS, FORWARD) if r.facts["causal"] and not r.facts["segment_length"]}
    )
    if cases:
        yield "causal, inputs a: ours in ms forward / both; then others' times as multiples of ours"
    for head_dim, length, batch_size, key_heads in cases:
        facts: dict[str, Any] = {
            "head_dim": head_dim,
            "length": length,
            "batch_size": batch_size,
            "key_heads": key_heads,
        }
        forward, both = (records.find(OURS, work, causal=True, **facts) for work in (FORWARD, BOTH))
        times = " / ".join("-" if r is None else f"{r.median_ms:.3g}" for r in (forward, both))
        ratios = "  ".join(
            f"{name} {_ratio(records, forward, p)}/{_ratio(records, both, p)}" for name, p in peers.items()
        )
        error = "" if forward is None else f"  error {forward.figures.get('error_out', float('nan')):.0e}"
        yield f"D{head_dim} S{length} B{batch_size} Hkv{key_heads}: {times} ms  {ratios}{error}"


def _case(record: DeviceRecord) -> tuple[int, ...]:
    return tuple(record.facts[name] for name in ("head_dim", "length", "batch_size", "key_heads"))


def _ratio(records: Records, record: DeviceRecord | None, peer: str) -> str:
    beside = records.beside(record, peer) if record else None
    if record is None or beside is None or record.median_ms is None or beside.median_ms is None:
        return "-"
    return f"{beside.median_ms / record.median_ms:.2f}"


def other(records: Records) -> Iterator[str]:
    """A line for each case; milliseconds of every kind of work."""
    for stage in ("host", "packed", "tuned"):
        grouped: dict[str, dict[str, list[str]]] = {}
        for record in records.of_stage(stage):
            if record.median_ms is not None:
                times = grouped.setdefault(record.case, {}).setdefault(record.implementation, [])
                times.append(f"{record.work} {record.median_ms:.3g}")
        for case, implementations in grouped.items():
            texts = [f"{name} ({', '.join(times)})" for name, times in implementations.items()]
            yield f"{stage} {case}, ms: {'; '.join(texts)}"


def failures(records: Records) -> Iterator[str]:
    """Each reason once."""
    reasons: dict[str, list[DeviceRecord]] = {}
    for record in records.all:
        if record.failure is not None:
            reasons.setdefault(f"{record.implementation}: {record.failure}", []).append(record)
    for reason, failed in [*reasons.items()][:_MOST_FAILURES]:
        yield f"failed {len(failed)}x, first {failed[0].stage} {failed[0].case} {failed[0].work}, {reason[:150]}"
    if len(reasons) > _MOST_FAILURES:
        yield f"and {len(reasons) - _MOST_FAILURES} other reasons: see the records"
