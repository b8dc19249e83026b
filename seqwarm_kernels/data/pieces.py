"""Parts of items, for planners that cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from .plan import Piece


def cut_item(item: Any, start: int, length: int) -> Any:
    """Tokens `start` to `start + length` of a mapping with "input_ids", or of a sequence, array or tensor of tokens.

    Of a mapping, every entry as long as "input_ids" is cut, too, and the others stay.
    """
    if not isinstance(item, Mapping):
        return item[start : start + length]
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
        self._dataset = dataset
        self._cut = cut

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """A batch at once, if the data set can do that: Hugging Face's are quicker so."""
        if not indices:
            return []
        plain = [index.item if isinstance(index, Piece) else index for index in indices]
        get_many = getattr(self._dataset, "__getitems__", None)
        items = [self._dataset[index] for index in plain] if get_many is None else get_many(plain)
        return [
            self._cut(item, index.start, index.length) if isinstance(index, Piece) else item
            for item, index in zip(items, indices, strict=True)
        ]


def _length(value: Any) -> int | None:
    return len(value) if hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0 else None
