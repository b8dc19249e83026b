"""What the entries of a batch are by their names."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache

import torch

from ..ops.resize_batch.schema import LOSS_MASKS
from ..utils.caller_warnings import warn_caller

_LABEL_NAMES = frozenset(("labels", "label", "label_ids", "targets", "target"))
#: Of these, the names that may have a prefix, as in "decoder_labels". "is_target" and "segment_label" are other things.
_LABEL_ENDINGS = ("_labels", "_label_ids", "_targets")
#: Names of entries with a number of tokens or a position for each row.
_COUNT_NAMES = frozenset(("start_positions", "end_positions", "length", "lengths", "seq_len", "seq_lens"))
_COUNT_ENDINGS = ("_length", "_lengths", "_seq_len", "_seq_lens")
warn_once = cache(warn_caller)  #: of each text, in a process


def own_name(path: object) -> str:
    """The last part of a path: "input_ids" of "encoder.input_ids"."""
    return str(path).rpartition(".")[2]


def is_label(name: str) -> bool:
    own = own_name(name)
    return own in _LABEL_NAMES or own.endswith(_LABEL_ENDINGS)


def counts_as_label(name: str) -> bool:
    """Also of "y" and "target_ids", which are labels in some batches and other tokens in others."""
    own = own_name(name)
    return is_label(name) or own == "y" or f"_{own}".endswith("_target_ids")


def holds_labels(name: str, dtype: torch.dtype) -> bool:
    """Whether the name counts as a label's, and the dtype can hold −100. "labels" hold labels in any dtype."""
    return counts_as_label(name) and (dtype.is_signed or is_called_labels(name))


def is_called_labels(name: str) -> bool:
    return f"_{own_name(name)}".endswith("_labels")


def is_loss_mask(name: str) -> bool:
    return own_name(name) in LOSS_MASKS


def is_filled(name: str, dtype: torch.dtype) -> bool:
    """Whether a token that is repeated must not count twice in the entry: labels and masks of the loss."""
    return holds_labels(name, dtype) or is_loss_mask(name)


def is_mask(name: str, mask_keys: Collection[str] | None) -> bool:
    return f"_{own_name(name)}".endswith(("_mask", "_bias")) if mask_keys is None else name in mask_keys


def warn_of_counts(names: Iterable[str]) -> None:
    """Warn of entries with one value for each row, or sequence, that count tokens or point at them."""
    for name in names:
        own = own_name(name)
        if own in _COUNT_NAMES or own.endswith(_COUNT_ENDINGS):
            warn_once(
                f"batch[{name!r}] counts tokens of whole rows or points at them, by its name, and does not change when "
                "rows are cut: compute it from the resized batch, or rename it if it holds something else"
            )
