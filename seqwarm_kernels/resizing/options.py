"""Checks of the options of `resize_batch`."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from torch import Tensor

from ..utils.checks import check_choice, check_int

MODES = ("truncate", "reshape", "flatten")
REMAINDERS = ("drop", "pad", "overlap")
_USUAL_COLLECTIONS = (list, tuple, set, frozenset)


def resizing_rule(mode: str, remainder: str, keep_last_token: bool) -> str:
    """The operator's rule for the caller's mode, remainder and keep_last_token."""
    check_string("mode", mode)
    check_string("remainder", remainder)
    check_choice("mode", mode, MODES)
    check_choice("remainder", remainder, REMAINDERS)
    if remainder != "drop" and mode != "reshape":
        raise ValueError(f"remainder={remainder!r} needs mode='reshape', got mode={mode!r}")
    if keep_last_token and mode != "truncate":
        raise ValueError(f"keep_last_token needs mode='truncate', got mode={mode!r}")
    if mode == "truncate":
        return "truncate_keep_last" if keep_last_token else "truncate"
    return "flatten" if mode == "flatten" else f"reshape_{remainder}"


def check_seq_dim(seq_dim: int) -> None:
    if check_int("seq_dim", seq_dim) not in (0, 1):
        raise ValueError(f"seq_dim must be 1 for (batch, sequence, ...) or 0 for (sequence, batch, ...), got {seq_dim}")


def check_string(argument: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be a string, got {type(value).__name__}")


def check_name_arguments(pad_values: object, keys: object, mask_keys: object) -> None:
    """`pad_values` must be a mapping, `keys` and `mask_keys` collections. Each may be None.

    An iterator is refused: the first of many readers would use it up.
    """
    if pad_values is not None and type(pad_values) is not dict and not isinstance(pad_values, Mapping):
        raise TypeError(f"pad_values must be a mapping of names to numbers, got {type(pad_values).__name__}")
    for argument, names in (("keys", keys), ("mask_keys", mask_keys)):
        if names is None or type(names) in _USUAL_COLLECTIONS:  # the check against a protocol takes microseconds
            continue
        if isinstance(names, str):
            raise TypeError(f"{argument} must be a collection of names, got the string {names!r}")
        if not isinstance(names, Collection) or isinstance(names, bytes) or hasattr(names, "__array__"):
            raise TypeError(f"{argument} must be a collection of names, such as a list, got {type(names).__name__}")


def check_names(argument: str, names: Collection[str] | None, batch: Mapping[str, object]) -> None:
    """All `names` must be names of tensors in the batch, or of lists with an entry for each row."""
    for name in () if names is None else names:
        if not isinstance(name, Hashable):
            raise TypeError(f"{argument} must be a collection of names, got {name!r} in it")
        if not isinstance(batch.get(name), Tensor) and not is_list(batch.get(name)):
            raise ValueError(f"{argument} names {name!r}, the tensors of the batch are {tensor_names(batch)}")


def check_keys(keys: Collection[str] | None, batch: Mapping[str, object]) -> None:
    if keys is not None and not keys:
        raise ValueError("keys must name at least one tensor of the batch, got none")
    check_names("keys", keys, batch)


def is_list(value: object) -> bool:
    return type(value) in (list, tuple)


def tensor_names(batch: Mapping[str, object]) -> list[str]:
    return [name for name, value in batch.items() if isinstance(value, Tensor)]
