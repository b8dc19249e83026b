"""States of batches: plain values, no contents of items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...utils.checks import check_int, check_same_configuration, check_state_entries
from .rank_batches import Position
from .schedule_progress import Counts
from .served import Front
from .windows import Start

ENTRIES = (
    "progress",
    "epoch",
    "fronts",
    "least",
    "counts",
    "before",
    "num_items",
    "max_length",
    "served",
    "configuration",
)


def pack_state(position: Position, counts: Counts, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Args:
    counts: what was handed out at that position, for people to read.
    """
    start = position.start
    return {
        "progress": counts._asdict(),
        "epoch": start.epoch,
        "fronts": [list(front) for front in start.fronts],
        "least": start.least,
        "counts": start.counts._asdict(),
        "before": start.before._asdict(),
        "num_items": position.num_items,
        "max_length": position.max_length,
        "served": position.served,
        "configuration": dict(configuration),
    }


def unpack_state(state: Mapping[str, Any], configuration: Mapping[str, Any]) -> Position:
    """Raises:
    TypeError, ValueError: no mapping, entries are missing or unknown, or of another configuration, whose name it says.
    """
    check_state_entries(state, ENTRIES)
    check_same_configuration(state["configuration"], configuration)
    for name in ("epoch", "least", "served"):
        check_int(name, state[name], minimum=0)
    for name in ("num_items", "max_length"):
        if state[name] is not None:
            check_int(name, state[name], minimum=0)
    _counts("progress", state["progress"])
    start = Start(
        epoch=state["epoch"],
        fronts=_fronts(state["fronts"]),
        counts=_counts("counts", state["counts"]),
        before=_counts("before", state["before"]),
        least=state["least"],
    )
    return Position(start, state["num_items"], state["max_length"], state["served"])


def _counts(name: str, entry: Any) -> Counts:
    if not isinstance(entry, Mapping) or sorted(entry) != sorted(Counts._fields):
        raise ValueError(f"{name} of state_dict must have the entries {list(Counts._fields)}, got {entry!r}")
    for counted, number in entry.items():
        check_int(f"{counted} in {name} of state_dict", number, minimum=0)
    return Counts(**entry)


def _fronts(entry: Any) -> tuple[Front, ...]:
    is_list = isinstance(entry, (list, tuple)) and len(entry) > 0
    if not is_list or any(not isinstance(front, (list, tuple)) or len(front) != 2 for front in entry):
        raise ValueError(f"fronts of state_dict must be pairs of a bound and a place, at least one, got {entry!r}")
    for bound, _ in entry:
        check_int("a bound in fronts of state_dict", bound, minimum=0)
    return tuple(Front(bound, place) for bound, place in entry)
