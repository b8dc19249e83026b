"""Where items come from: what a stream of items must be able to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Source(Protocol[T_co]):
    """Items one after another, from any place where a state was taken.

    `iter(source)` goes on where the loaded state stands, or starts an epoch; after the last item of an epoch the next
    `iter(source)` starts the next one. An infinite source never ends. The same state always gives the same items in the
    same order, and on every rank.

    `state_dict()` after n items names the place of item n + 1. It is JSON-able, holds no contents of items, and
    loading it costs the same wherever it stands. It may be asked for between any two items, and before the first.
    """

    def __iter__(self) -> Iterator[T_co]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
