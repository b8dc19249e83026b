"""From what is planned to what a model takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .pieces import cut_item
from .plan import Piece


class Prepare:
    """A list of indices, items or pieces -> a batch: fetch, transform, cut, collate. Picklable if its parts are.

    Args:
        collate: a list of items -> a batch: `PaddedCollator` or `PackedCollator`.
        dataset: takes the indices of a `LengthBatchSampler`; None: items come themselves.
        transform: of an item, before it is cut: tokenising.
        cut: (item, start, length) -> the part of it.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        *,
        dataset: Any = None,
        transform: Callable[[Any], Any] | None = None,
        cut: Callable[[Any, int, int], Any] = cut_item,
    ) -> None:
        self._collate = collate
        self._dataset = dataset
        self._transform = transform
        self._cut = cut

    def __call__(self, batch: Sequence[Any]) -> Any:
        return self._collate([self._item(entry) for entry in batch])

    def _item(self, entry: Any) -> Any:
        item = entry.item if isinstance(entry, Piece) else entry
        if self._dataset is not None:
            item = self._dataset[item]
        if self._transform is not None:
            item = self._transform(item)
        return self._cut(item, entry.start, entry.length) if isinstance(entry, Piece) else item
