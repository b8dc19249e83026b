"""Prepare planned batches: fetch the items, transform them, cut them to pieces and collate them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from ...ops.resize_batch.schema import IGNORED_LABEL
from ...utils.caller_warnings import warn_caller
from ...utils.checks import check_int
from ..batch_planning.plan import TRUNCATED, Piece
from ..sources.item_tokens import has_entries, tokens_of

_NO_LABEL = (
    "no label of an item is left after its cut to {} tokens, so the model learns nothing from it: all labels of these "
    "tokens are -100, as those of a long prompt. Begin with a larger min_seq_length, use a larger max_length, or split "
    "items with too_long='split'"
)

#: Number of truncated items whose labels are looked at.
_CHECKED_FOR_LABELS = 500


def cut_item(item: Any, start: int, length: int) -> Any:
    """Return tokens `start` to `start + length` of an item.

    Args:
        item: a sequence, array or tensor of tokens, or a mapping with "input_ids", or a tuple or list of entries whose
            first one has the tokens. In a mapping or tuple, every entry as long as the tokens is cut. The other entries
            stay.
        start: the first token.
        length: number of tokens.

    Raises:
        TypeError: `item` is neither a mapping nor a sequence, or it is text, or another argument is not an int.
        ValueError: `item` is a mapping without "input_ids", or these have several dimensions, or `start` or `length` is
            negative.
    """
    start, length = check_int("start", start, minimum=0), check_int("length", length, minimum=0)
    tokens = tokens_of(item, "an item to cut")
    _check_tokenized(tokens)
    if tokens is item:
        return item[start : start + length]
    num_tokens = len(tokens)

    def cut(value: Any) -> Any:
        has_tokens = hasattr(value, "__getitem__") and not isinstance(value, (str, bytes, Mapping))
        return value[start : start + length] if has_tokens and _length(value) == num_tokens else value

    if isinstance(item, (dict, Mapping)):  # the check for a Mapping takes long
        return {name: cut(value) for name, value in item.items()}
    return _like(item, [cut_item(item[0], start, length), *map(cut, item[1:])])


def _like(item: Any, entries: list[Any]) -> Any:
    """A tuple or list of the type of `item`. A namedtuple takes its entries one by one."""
    return type(item)(*entries) if hasattr(item, "_fields") else type(item)(entries)


def _check_tokenized(tokens: Any) -> None:
    if isinstance(tokens, (str, bytes)):
        raise TypeError(
            f"an item to cut must hold tokens, got {tokens!r:.60}, whose characters would be cut: tokenize it first, "
            "with the transform of Prepare or in the dataset"
        )
    if not hasattr(tokens, "__getitem__") or getattr(tokens, "ndim", 1) == 0 or getattr(tokens, "is_sparse", False):
        raise TypeError(f"an item to cut must be a mapping or a sequence of tokens, got {type(tokens).__name__}")


class PieceDataset(Dataset[Any]):
    """A map-style dataset that can be indexed with a `Piece` as well as with an index.

    A batch raises a ValueError if an item has more tokens than its length says, and the plan serves all of it: the
    tokens at its end would be lost. Items of a `cut` of your own are not checked.

    Warns once if all labels of an item are in its end, which the plan leaves out (`too_long="truncate"`,
    `warmup="cut"`). The first 500 truncated items are looked at, in each worker.

    Args:
        dataset: the map-style dataset to wrap.
        cut: returns a part of an item: cut(item, start, length).

    Raises:
        TypeError: `dataset` is not a map-style dataset, or `cut` is not a function.
    """

    def __init__(self, dataset: Any, cut: Callable[[Any, int, int], Any] = cut_item) -> None:
        _check_dataset(dataset)
        _check_function("cut", cut)
        self._dataset = dataset
        self._cut = _PieceCutter(cut)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Fetch a batch at once if the dataset can, which is faster with datasets of Hugging Face."""
        return self._cut(_fetch(self._dataset, _without_pieces(indices)), indices)


class ItemDataset(Dataset[Any]):
    """A dataset that is indexed with the items themselves.

    With it, a `LengthBatchStream`, which yields items, is the `batch_sampler` of a DataLoader. `Prepare` as its
    `collate_fn` turns the items into a batch, in the DataLoader's workers.

    After an interrupted iteration, the next one of a DataLoader with workers leaves out the batches that were fetched
    ahead. A `ResumableLoader` yields them.
    """

    def __getitem__(self, item: Any) -> Any:
        return item


class Prepare:
    """Turn a list of indices, items or pieces into a batch. Picklable if its parts are.

    A batch raises a ValueError if an item has more tokens after `transform` than its length says, as `PieceDataset`.
    Items of a `cut` of your own are not checked. Warns of items that lose all their labels, as `PieceDataset`.

    Args:
        collate: turns a list of items into a batch: `PaddedCollator` or `PackedCollator`.
        dataset: the map-style dataset that a `LengthBatchSampler` indexes. None: the list holds the items themselves.
        transform: called with each item before cutting, for example to tokenize it.
        cut: returns a part of an item: cut(item, start, length).

    Raises:
        TypeError: `dataset` is not a map-style dataset, or another argument is not a function.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        *,
        dataset: Any = None,
        transform: Callable[[Any], Any] | None = None,
        cut: Callable[[Any, int, int], Any] = cut_item,
    ) -> None:
        _check_function("collate", collate)
        _check_function("cut", cut)
        if transform is not None:
            _check_function("transform", transform)
        if dataset is not None:
            _check_dataset(dataset)
        self.collate = collate
        self.dataset = dataset
        self._transform = transform
        self._cut = _PieceCutter(cut)

    def __call__(self, batch: Sequence[Any]) -> Any:
        items = _without_pieces(batch)
        if self.dataset is not None:
            items = _fetch(self.dataset, items)
        if self._transform is not None:
            items = list(map(self._transform, items))
        return self.collate(self._cut(items, batch))


def _without_pieces(entries: Sequence[Any]) -> list[Any]:
    """Replace each piece by its item, or by the index of its item."""
    return [entry.item if isinstance(entry, Piece) else entry for entry in entries]


def _fetch(dataset: Any, indices: list[Any]) -> list[Any]:
    get_many = getattr(dataset, "__getitems__", None)
    if get_many is None or not indices:
        return [dataset[index] for index in indices]
    return get_many(indices)


class _PieceCutter:
    """Cuts the items whose entry is a piece. The other items stay.

    Warns once if an item loses all its labels. Only the first truncated items are looked at, because it takes time.
    """

    def __init__(self, cut: Callable[[Any, int, int], Any]) -> None:
        self._cut = cut
        self._unchecked = _CHECKED_FOR_LABELS

    def __call__(self, items: Sequence[Any], entries: Sequence[Any]) -> list[Any]:
        cut = self._cut
        pieces = [
            cut(item, entry.start, entry.length) if isinstance(entry, Piece) else item
            for item, entry in zip(items, entries, strict=True)
        ]
        if cut is cut_item:
            _check_ends(items, entries)
        if self._unchecked > 0:
            self._check_labels(items, pieces, entries)
        return pieces

    def _check_labels(self, items: Sequence[Any], pieces: Sequence[Any], entries: Sequence[Any]) -> None:
        """The tail of a truncated item is left out. That of a split one is in another piece."""
        truncated = [
            number for number, entry in enumerate(entries) if isinstance(entry, Piece) and entry.item_end == TRUNCATED
        ]
        for number in truncated[: self._unchecked]:
            self._unchecked -= 1
            if _loses_labels(items[number], pieces[number]):
                self._unchecked = 0
                warn_caller(_NO_LABEL.format(entries[number].length))
                return


def _loses_labels(item: Any, piece: Any) -> bool:
    """Whether an item has labels of its own, and its piece none that is not ignored."""
    entries = zip(_possible_labels(item), _possible_labels(piece), strict=False)
    return any(_has_label(whole) and not _has_label(part) for whole, part in entries if part is not whole)


def _possible_labels(item: Any) -> list[Any]:
    """The "labels" of a mapping, or the entries of a tuple behind the first. Other entries never hold -100."""
    if isinstance(item, Mapping):
        return [item.get("labels")]
    return [*_possible_labels(item[0]), *item[1:]] if has_entries(item) else []


def _has_label(labels: Any) -> bool:
    """Whether ints of tokens are not all ignored."""
    if isinstance(labels, (Tensor, np.ndarray)):
        return bool((labels != IGNORED_LABEL).any())
    is_ints = isinstance(labels, (list, tuple)) and len(labels) > 0 and isinstance(labels[0], Integral)
    return is_ints and labels.count(IGNORED_LABEL) < len(labels)


def _check_ends(items: Sequence[Any], entries: Sequence[Any]) -> None:
    """No token may follow the last piece of an item."""
    for number, (item, entry) in enumerate(zip(items, entries, strict=True)):
        if not isinstance(entry, Piece) or (end := entry.start + entry.length) != entry.item_end:
            continue
        tokens = _length(tokens_of(item))
        if tokens is not None and tokens > end:
            name = f"item {entry.item}" if isinstance(entry.item, Integral) else f"item {number} of the batch"
            raise ValueError(
                f"{name} must have the {end} tokens that its length says, got {tokens}, whose end would be lost: count "
                "the lengths of items as they are cut, with tokens that are added later, such as an end of text"
            )


def _check_dataset(dataset: Any) -> None:
    has_items = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    is_scalar = getattr(dataset, "ndim", 1) == 0  # NumPy's numbers and such tensors have a __getitem__, too
    if not has_items or is_scalar or isinstance(dataset, (str, bytes, type)):
        raise TypeError(f"dataset must be a map-style dataset or a list, got {_kind(dataset)}")


def _check_function(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {_kind(value)}")


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _length(value: Any) -> int | None:
    return len(value) if hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0 else None
