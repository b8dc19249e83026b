"""The state of batches, wherever a loader keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .state import ENTRIES

#: Where torchdata counts batches that came out since it took a state.
_SINCE = ("steps_since_snapshot", "_steps_since_snapshot")


def batch_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """That of the `LengthBatchSampler` or `LengthBatchStream` inside of a loader's state.

    torchdata's StatefulDataLoader takes its own states back with the same number of workers only. What is in them does
    not depend on it: `sampler.load_state_dict(batch_state(state))`, and a new loader on the sampler.

    Raises:
        ValueError: there is none, or the loader took it some batches before: its `snapshot_every_n_steps` must be 1.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping, got {type(state_dict).__name__}")
    found = next(_search(state_dict), None)
    if found is None:
        raise ValueError(f"state_dict must hold a state of batches, got {list(state_dict)}")
    return found


def _search(state: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(state, Mapping):
        return
    if sorted(map(str, state)) == sorted(ENTRIES):
        yield dict(state)
        return
    since = sum(int(state.get(name, 0)) for name in _SINCE)
    for value in state.values():
        for found in _search(value):
            if since:
                raise ValueError(
                    f"state_dict must be that of the last batch, got one of {since} batches before it: "
                    "snapshot_every_n_steps must be 1"
                )
            yield found
