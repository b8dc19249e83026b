"""Parts of items, for planners that cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from ..planning.plan import Piece


def cut_item(item: Any, start: int, length: int) -> Any:
    """Tokens `start` to `start + length` of a mapping with "input_ids", or of a sequence, array or tensor of tokens.

    Of a mapping, every entry as long as "input_ids" is cut, too, and the others stay.
    """
    if not isinstance(item, Mapping):
        if not hasattr(item, "__getitem__"):
            raise TypeError(f"an item to cut must be a mapping or a sequence of tokens, got {type(item).__name__}")
        return item[start : start + length]
    if "input_ids" not in item:
        raise ValueError(f"an item to cut must have input_ids, got {list(item)}")
    tokens = len(item["input_ids"])

    def cut(value: Any) -> Any:
        has_tokens = hasattr(value, "__getitem__") and not isinstance(value, (str, bytes, Mapping))
        return value[start : start + length] if has_tokens and _length(value) == tokens else value

    return {name: cut(value) for name, value in item.items()}


class PieceDataset(Dataset[Any]):
    """A map-style data set that takes a `Piece` for an index, and indices as before.

    Args:
        dataset: what is cut.
        cut: (item, start, length) -> the part of it. Default `cut_item`.
    """

    def __init__(self, dataset: Any, cut: Callable[[Any, int, int], Any] = cut_item) -> None:
        check_dataset(dataset)
        check_function("cut", cut)
        self._dataset = dataset
        self._cut = cut

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """A batch at once, if the data set can do that: Hugging Face's are quicker so."""
        return cut_to(fetch(self._dataset, whole(indices)), indices, self._cut)


def whole(entries: Sequence[Any]) -> list[Any]:
    """Indices or items, also of those that are pieces."""
    return [entry.item if isinstance(entry, Piece) else entry for entry in entries]


def fetch(dataset: Any, indices: list[Any]) -> list[Any]:
    get_many = getattr(dataset, "__getitems__", None)
    if get_many is None or not indices:
        return [dataset[index] for index in indices]
    return get_many(indices)


def cut_to(items: Sequence[Any], entries: Sequence[Any], cut: Callable[[Any, int, int], Any]) -> list[Any]:
    """What the entries that are pieces name of their items, and the other items as they are."""
    return [
        cut(item, entry.start, entry.length) if isinstance(entry, Piece) else item
        for item, entry in zip(items, entries, strict=True)
    ]


def check_dataset(dataset: Any) -> None:
    has_items = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if not has_items or isinstance(dataset, (str, bytes, type)):
        raise TypeError(f"dataset must have items by number, as lists and map-style datasets, got {_kind(dataset)}")


def check_function(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {_kind(value)}")


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _length(value: Any) -> int | None:
    return len(value) if hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0 else None
