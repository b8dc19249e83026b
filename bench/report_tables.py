"""The report's tables, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from .alibi_attention.gpu import BOTH, FORWARD
from .alibi_attention.peers import CUDNN, CUDNN_MASK, EAGER, FLASH, FLEX, FLEX_FLASH, FLEX_ROWS, MASK
from .common.goals import Goal, goals
from .gpu.lookup import OURS, OURS_NO_SKIP, Records, gigabytes_per_second, teraflops
from .gpu.records import DeviceRecord
from .gpu.summary import failures, value, wanted

_PEERS = {
    "skipping": OURS,
    "no skip": OURS_NO_SKIP,
    **{peer.name: peer.name for peer in (FLEX, FLEX_FLASH, FLASH, CUDNN, CUDNN_MASK, MASK, EAGER)},
}


def goals_table(records: Records) -> str:
    return goal_rows(goals(records))


def goal_rows(found: Iterable[Goal]) -> str:
    rows = ["| what | measured | goal | reached | where |", "|---|---|---|---|---|"]
    for goal in found:
        reached = {True: "yes", False: "no", None: ""}[goal.reached()]
        rows.append(f"| {goal.what} | {value(goal)} | {wanted(goal)} | {reached} | {goal.where} |")
    return "\n".join(rows)


def _row(records: Records, record: DeviceRecord, names: dict[str, str]) -> list[str]:
    found = [records.beside(record, implementation) for implementation in names.values()]
    return ["" if other is None else _time(other) for other in found]


def _time(record: DeviceRecord) -> str:
    """With the middle half behind it."""
    return f"{record.median_ms:.4g} ({record.low_ms:.3g}–{record.high_ms:.3g})"


def _measured(names: dict[str, str], records: list[DeviceRecord]) -> dict[str, str]:
    """Without the peers that have no time anywhere."""
    there = {record.implementation for record in records if record.median_ms is not None}
    return {label: name for label, name in names.items() if name in there or label in ("skipping", "no skip")}


def attention_table(records: Records) -> str:
    """A row for each case, work and kind of inputs; milliseconds."""
    found = [*records.of_stage("long"), *records.of_stage("lengths")]
    names = _measured(_PEERS, found)
    first = [r for work in (FORWARD, BOTH) for inputs in "ab" for r in records.each(OURS, work, inputs)]
    first = [record for record in first if record.stage != "segments"]
    if not first:
        return ""
    first.sort(key=lambda r: (r.work, r.inputs, not r.facts["causal"], r.facts["head_dim"], r.facts["length"]))
    head = ["case", "inputs", "keys visited", "error", "TFLOP/s", *names]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for record in first:
        figures = record.figures
        share = f"{figures['attended_share']:.1%}" if "attended_share" in figures else ""
        errors = [error for name, error in figures.items() if name.startswith("error")]
        error = f"{max(errors):.0e}" if errors else ""
        cells = [f"{record.work}, {record.case}", record.inputs, share, error, f"{teraflops(record):.0f}"]
        rows.append(f"| {' | '.join([*cells, *_row(records, record, names)])} |")
    return "\n".join(rows)


def segments_table(records: Records) -> str:
    found = records.of_stage("segments")
    names = _measured({**_PEERS, FLEX_ROWS.name: FLEX_ROWS.name}, found)
    del names["no skip"]
    first = [record for work in (FORWARD, BOTH) for record in records.each(OURS, work) if record.stage == "segments"]
    if not first:
        return ""
    first.sort(key=lambda record: (record.work, record.facts["segment_length"]))
    head = ["case", "GB/s", "share of a copy", *names]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    copied = records.copy_rate()
    for record in first:
        rate = gigabytes_per_second(record)
        cells = [f"{record.work}, {record.case}", "" if rate is None else f"{rate:.0f}"]
        cells.append("" if rate is None or copied is None else f"{rate / copied:.0%}")
        rows.append(f"| {' | '.join([*cells, *_row(records, record, names)])} |")
    return "\n".join(rows)


def stage_table(records: Records, stage: str) -> str:
    found = [record for record in records.of_stage(stage) if record.failure is None]
    if not found:
        return ""
    rows = [f"| {stage} | work | implementation | ms | figures |", "|---|---|---|---|---|"]
    for record in found:
        time = "" if record.median_ms is None else _time(record)
        figures = ", ".join(f"{name} {number:.4g}" for name, number in record.figures.items())
        rows.append(f"| {record.case} | {record.work} | {record.implementation} | {time} | {figures} |")
    return "\n".join(rows)


def failures_list(records: Records) -> str:
    return "\n".join(f"- {reason}" for reason in failures(records))
