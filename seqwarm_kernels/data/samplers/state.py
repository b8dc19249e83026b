"""Where batches are: one `Position` of all ranks, and its state of plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from ...utils.checks import check_same_configuration, check_state_entries

#: Where a reader continues in an epoch: "position", the number of items before it, and what else the reader needs.
Cursor: TypeAlias = dict[str, Any]


class Counts(NamedTuple):
    """Numbers for all ranks together since the beginning of training."""

    items: int = 0
    tokens: int = 0  #: without padding
    batches: int = 0


class Position(NamedTuple):
    """Where all ranks are between two steps: enough to form the open window again, and every later one."""

    epoch: int
    #: The cursor up to which items were served before the open window. Under warmup by bucket, short items are served
    #: first: an entry (bound, cursor) is that of items of at most `bound` tokens, and more than the previous bound.
    served_up_to: tuple[tuple[int, Cursor], ...]
    served: Counts
    window_start: Counts  #: served before the open window
    epoch_start: Counts  #: served before the epoch
    min_length: int = 0  #: the current length is at least this, because no shorter item was left in the epoch

    @property
    def batches_of_window(self) -> int:
        """Number of batches of the open window that were served."""
        return self.served.batches - self.window_start.batches

    @property
    def is_epoch_start(self) -> bool:
        return self.served == self.epoch_start


_COUNTS = ("served", "window_start", "epoch_start")
_ENTRIES = (*Position._fields, "configuration")

#: Entries in which torchdata counts the batches since it took a state.
_STEPS_SINCE = ("steps_since_snapshot", "_steps_since_snapshot")


def pack_state(position: Position, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The state at `position`, JSON-able, without the contents of items."""
    return {
        **position._asdict(),
        **{name: getattr(position, name)._asdict() for name in _COUNTS},
        "served_up_to": [list(entry) for entry in position.served_up_to],
        "configuration": dict(configuration),
    }


def unpack_state(state: Mapping[str, Any], configuration: Mapping[str, Any]) -> Position:
    """The position of a state.

    Raises:
        TypeError: `state` is not a mapping.
        ValueError: entries are missing or unknown, or the configuration is not `configuration`.
    """
    check_state_entries(state, _ENTRIES)
    check_same_configuration(state["configuration"], configuration)
    counts = {name: Counts(**state[name]) for name in _COUNTS}
    served_up_to = tuple((bound, dict(cursor)) for bound, cursor in state["served_up_to"])
    return Position(state["epoch"], served_up_to, **counts, min_length=state["min_length"])


def batch_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the `LengthBatchSampler` or `LengthBatchStream` inside a loader's state.

    torchdata's StatefulDataLoader loads its own states with the same number of workers only. The state inside does
    not depend on that number: call `sampler.load_state_dict(batch_state(state))` and make a new loader.

    Raises:
        ValueError: `state_dict` has no state of batches, or the loader took that state some batches earlier: its
            `snapshot_every_n_steps` must be 1.
    """
    found = next(_search(state_dict), None)
    if found is None:
        raise ValueError(f"state_dict must hold a state of batches, got {list(state_dict)}")
    return found


def _search(state: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(state, Mapping):
        return
    if state.keys() == set(_ENTRIES):
        yield dict(state)
        return
    steps = sum(state.get(name, 0) for name in _STEPS_SINCE)
    for value in state.values():
        for found in _search(value):
            if steps:
                raise ValueError(f"state_dict must be that of the last batch, got one of {steps} batches before it")
            yield found
