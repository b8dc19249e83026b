"""Prepare planned batches: fetch the items, transform them, cut them to pieces and collate them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from ..batch_planning.plan import Piece
from ..sources.item_tokens import tokens_of


def cut_item(item: Any, start: int, length: int) -> Any:
    """Return tokens `start` to `start + length` of an item.

    Args:
        item: a sequence, array or tensor of tokens, or a mapping with "input_ids", or a tuple or list of entries whose
            first one has the tokens. In a mapping or tuple, every entry as long as the tokens is cut. The other entries
            stay.
        start: the first token.
        length: number of tokens.

    Raises:
        TypeError: `item` is text, or no sequence.
        ValueError: `item` is a mapping without "input_ids", or these have several dimensions.
    """
    tokens = tokens_of(item, "an item to cut")
    if isinstance(tokens, (str, bytes)):
        raise TypeError(f"an item to cut must hold tokens, got {tokens!r:.60}, whose characters would be cut")
    if tokens is item:
        return item[start : start + length]
    num_tokens = len(tokens)

    def cut(value: Any) -> Any:
        has_tokens = hasattr(value, "__getitem__") and not isinstance(value, (str, bytes, Mapping))
        return value[start : start + length] if has_tokens and _length(value) == num_tokens else value

    if isinstance(item, (dict, Mapping)):  # the check for a Mapping takes long
        return {name: cut(value) for name, value in item.items()}
    entries = [cut_item(item[0], start, length), *map(cut, item[1:])]
    return type(item)(*entries) if hasattr(item, "_fields") else type(item)(entries)  # a namedtuple, a tuple or a list


class Prepare:
    """Turn a list of indices, items or pieces into a batch. Picklable if its parts are.

    A batch raises a ValueError if an item has more tokens than its length says, and the plan yields all of it: the
    tokens at its end would be lost. Items of a `cut` of your own are not checked.

    Args:
        collate: turns a list of items into a batch: `PaddedCollator` or `PackedCollator`.
        dataset: the map-style dataset that a `LengthBatchSampler` indexes. None: the list holds the items themselves.
        transform: called with each item before cutting, for example to tokenize it.
        cut: returns a part of an item: cut(item, start, length).
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        *,
        dataset: Any = None,
        transform: Callable[[Any], Any] | None = None,
        cut: Callable[[Any, int, int], Any] = cut_item,
    ) -> None:
        self.collate = collate
        self.dataset = dataset
        self._transform = transform
        self._cut = cut

    def __call__(self, batch: Sequence[Any]) -> Any:
        items = [entry.item if isinstance(entry, Piece) else entry for entry in batch]
        if self.dataset is not None and items:
            get_many = getattr(self.dataset, "__getitems__", None)  # faster with datasets of Hugging Face
            items = get_many(items) if get_many else [self.dataset[index] for index in items]
        if self._transform is not None:
            items = list(map(self._transform, items))
        return self.collate([self._piece(*pair) for pair in zip(items, batch, strict=True)])

    def _piece(self, item: Any, entry: Any) -> Any:
        """The part of `item` that `entry` says, if that is a piece."""
        if not isinstance(entry, Piece):
            return item
        piece = self._cut(item, entry.start, entry.length)
        if self._cut is cut_item:
            end, tokens = entry.start + entry.length, _length(tokens_of(item))
            if end == entry.item_end and tokens is not None and tokens > end:
                raise ValueError(
                    f"item {entry.item!r:.40} must have the {end} tokens that its length says, got {tokens}"
                )
        return piece


class PieceDataset(Dataset[Any]):
    """A map-style dataset that can be indexed with a `Piece` as well as with an index. Checks items as `Prepare`.

    Args:
        dataset: the map-style dataset to wrap.
        cut: returns a part of an item: cut(item, start, length).
    """

    def __init__(self, dataset: Any, cut: Callable[[Any, int, int], Any] = cut_item) -> None:
        self._dataset = dataset
        self._prepare = Prepare(list, dataset=dataset, cut=cut)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        return self._prepare(indices)


class ItemDataset(Dataset[Any]):
    """A dataset that is indexed with the items themselves.

    With it, a `LengthBatchStream`, which yields items, is the `batch_sampler` of a DataLoader. `Prepare` as its
    `collate_fn` turns the items into a batch, in the DataLoader's workers.

    After an interrupted iteration, the next one of a DataLoader with workers leaves out the batches that were fetched
    ahead. A `ResumableLoader` yields them.
    """

    def __getitem__(self, item: Any) -> Any:
        return item


def _length(value: Any) -> int | None:
    return len(value) if hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0 else None
