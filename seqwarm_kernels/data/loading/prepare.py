"""From what is planned to what a model takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .pieces import check_dataset, check_function, cut_item, cut_to, fetch, whole


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
        check_function("collate", collate)
        check_function("cut", cut)
        if transform is not None:
            check_function("transform", transform)
        if dataset is not None:
            check_dataset(dataset)
        self._collate = collate
        self._dataset = dataset
        self._transform = transform
        self._cut = cut

    def __call__(self, batch: Sequence[Any]) -> Any:
        items = whole(batch)
        if self._dataset is not None:
            items = fetch(self._dataset, items)
        if self._transform is not None:
            items = list(map(self._transform, items))
        return self._collate(cut_to(items, batch, self._cut))
