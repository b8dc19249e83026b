"""States of batches: plain values, without the contents of items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...utils.checks import check_count, check_same_configuration, check_state_entries
from ..batch_planning.planner import BatchPlanner
from .rank_batches import Position
from .schedule_progress import Counts
from .served import ServedUpTo
from .windows import Start

_ENTRIES = (
    "progress",
    "epoch",
    "served_up_to",
    "min_length",
    "counts",
    "epoch_start_counts",
    "num_items",
    "max_length",
    "batches_served",
    "configuration",
)

#: Entries in which torchdata counts the batches since it took a state.
_STEPS_SINCE = ("steps_since_snapshot", "_steps_since_snapshot")


def pack_state(position: Position, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The state at `position`, JSON-able."""
    start = position.start
    return {
        "progress": position.counts._asdict(),
        "epoch": start.epoch,
        "served_up_to": [list(entry) for entry in start.served_up_to],
        "min_length": start.min_length,
        "counts": start.counts._asdict(),
        "epoch_start_counts": start.epoch_start_counts._asdict(),
        "num_items": position.num_items,
        "max_length": position.max_length,
        "batches_served": position.batches_served,
        "configuration": dict(configuration),
    }


def unpack_state(state: Mapping[str, Any], configuration: Mapping[str, Any]) -> Position:
    """The position of a state.

    Raises:
        TypeError: `state` is not a mapping, or an entry has the wrong type.
        ValueError: entries are missing or unknown, an entry is invalid, or the configuration is not `configuration`.
    """
    check_state_entries(state, _ENTRIES)
    if not isinstance(state["configuration"], Mapping):
        raise TypeError(f"configuration of state_dict must be a mapping, got {type(state['configuration']).__name__}")
    check_same_configuration(state["configuration"], configuration)
    epoch, min_length, batches_served = (
        check_count(name, state[name]) for name in ("epoch", "min_length", "batches_served")
    )
    num_items, max_length = (
        None if state[name] is None else check_count(name, state[name], minimum=1)
        for name in ("num_items", "max_length")
    )
    if num_items is None and batches_served:
        raise ValueError(
            f"batches_served of state_dict must be 0 where num_items is None, outside of a window, got {batches_served}"
        )
    start = Start(
        epoch=epoch,
        served_up_to=_served_up_to(state["served_up_to"]),
        counts=_counts("counts", state["counts"]),
        epoch_start_counts=_counts("epoch_start_counts", state["epoch_start_counts"]),
        min_length=min_length,
    )
    position = Position(start, _counts("progress", state["progress"]), num_items, max_length, batches_served)
    _check_counts(position)
    return position


def check_planned(position: Position, planner: BatchPlanner) -> None:
    """The lengths in a position must be those that `planner` can plan."""
    longest = planner.longest or 0
    bounds = [entry.bound for entry in position.start.served_up_to]
    if bounds[-1] != longest or sorted(set(bounds)) != bounds:
        raise ValueError(f"bounds in served_up_to of state_dict must increase up to {longest}, got {bounds}")
    limit = 0 if planner.scheduler is None else longest
    if position.start.min_length > limit:
        raise ValueError(f"min_length of state_dict must be at most {limit}, got {position.start.min_length}")
    max_length = position.max_length
    is_scheduled = planner.scheduler is not None and position.num_items is not None
    if (max_length is not None) != is_scheduled or (max_length is not None and max_length > limit):
        wanted = f"at most {limit}" if is_scheduled else "None without a schedule or outside of a window"
        raise ValueError(f"max_length of state_dict must be {wanted}, got {max_length}")


def batch_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the `LengthBatchSampler` or `LengthBatchStream` inside a loader's state.

    torchdata's StatefulDataLoader loads its own states with the same number of workers only. The state inside does
    not depend on that number: call `sampler.load_state_dict(batch_state(state))` and make a new loader.

    Raises:
        TypeError: `state_dict` is not a mapping, or a count of batches in it is not an int.
        ValueError: `state_dict` has no state of batches, or the loader took that state some batches earlier: its
            `snapshot_every_n_steps` must be 1.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping, got {type(state_dict).__name__}")
    found = next(_search(state_dict), None)
    if found is None:
        raise ValueError(f"state_dict must hold a state of batches, got {list(state_dict)}")
    return found


def _check_counts(position: Position) -> None:
    """Counts increase from the start of the epoch to that of the window and on, by what a window can hold."""
    start = position.start
    for name in Counts._fields:
        numbers = [getattr(counts, name) for counts in (start.epoch_start_counts, start.counts, position.counts)]
        if sorted(numbers) != numbers:
            raise ValueError(
                f"{name} of state_dict must increase from epoch_start_counts to counts to progress, got "
                f"{', '.join(map(str, numbers))}"
            )
    items, _, batches = np.subtract(position.counts, start.counts).tolist()
    if batches != position.batches_served or items > (position.num_items or 0):
        raise ValueError(
            "progress of state_dict must be counts and what was served of the window, "
            f"{position.batches_served} batches and at most {position.num_items or 0} items, got {batches} and {items}"
        )


def _counts(name: str, entry: Any) -> Counts:
    if not isinstance(entry, Mapping) or sorted(entry) != sorted(Counts._fields):
        raise ValueError(f"{name} of state_dict must have the entries {list(Counts._fields)}, got {entry!r}")
    return Counts(
        **{counted: check_count(f"{counted} in {name} of state_dict", number) for counted, number in entry.items()}
    )


def _served_up_to(entries: Any) -> tuple[ServedUpTo, ...]:
    is_list = isinstance(entries, (list, tuple)) and len(entries) > 0
    if not is_list or any(not isinstance(entry, (list, tuple)) or len(entry) != 2 for entry in entries):
        raise ValueError(
            f"served_up_to of state_dict must be pairs of a bound and a cursor, at least one, got {entries!r}"
        )
    return tuple(
        ServedUpTo(check_count("a bound in served_up_to of state_dict", bound), cursor) for bound, cursor in entries
    )


def _search(state: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(state, Mapping):
        return
    if sorted(map(str, state)) == sorted(_ENTRIES):
        yield dict(state)
        return
    steps = sum(check_count(f"{name} of state_dict", state.get(name, 0)) for name in _STEPS_SINCE)
    for value in state.values():
        for found in _search(value):
            if steps:
                raise ValueError(
                    f"state_dict must be that of the last batch, got one of {steps} batches before it: "
                    "snapshot_every_n_steps must be 1"
                )
            yield found
