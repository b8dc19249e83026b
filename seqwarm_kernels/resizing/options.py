"""The options of `resize_batch`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from ..ops.backends import check_backend
from ..ops.resize_batch.schema import IGNORED_LABEL
from ..utils.checks import check_choice, check_int
from .entry_names import is_loss_mask, own_name

MODES = ("truncate", "reshape", "flatten", "segments", "window")
KEEPING_SHAPE = ("segments", "window")
REMAINDERS = ("drop", "pad", "overlap")
#: How "segments" tells a model where they begin.
BOUNDARIES = ("position_ids", "segment_length", "cu_seq_lens")


class Options(NamedTuple):
    """The options that decide how a batch is resized, whatever its length."""

    mode: str = "truncate"
    remainder: str = "drop"
    seq_dim: int = 1
    keep_last_token: bool = False
    keys: Collection[str] | None = None
    mask_keys: Collection[str] | None = None
    backend: str | None = None
    boundaries: str | None = None
    documents: int = 1
    keep_first_labels: bool = False
    lengths: tuple[int, int] | None = None

    def rule(self) -> str:
        """The operator's rule. Raises if an option is wrong for every batch."""
        if check_int("seq_dim", self.seq_dim) not in (0, 1):
            raise ValueError(f"seq_dim must be 0 or 1, got {self.seq_dim}")
        check_backend(self.backend)
        check_choice("mode", self.mode, MODES)
        check_choice("remainder", self.remainder, REMAINDERS)
        if self.remainder != "drop" and self.mode != "reshape":
            raise ValueError(f"remainder={self.remainder!r} needs mode='reshape', got mode={self.mode!r}")
        if self.keep_last_token and self.mode != "truncate":
            raise ValueError(f"keep_last_token needs mode='truncate', got mode={self.mode!r}")
        if self.mode == "segments":
            check_choice("boundaries", self.boundaries or BOUNDARIES[0], BOUNDARIES)
            check_int("documents", self.documents, minimum=1)
        elif self.boundaries is not None:
            raise ValueError(f"boundaries={self.boundaries!r} needs mode='segments', got mode={self.mode!r}")
        if self.mode in KEEPING_SHAPE:
            if self.seq_dim == 0:
                raise ValueError(f"seq_dim must be 1 with mode={self.mode!r}, got 0")
            return self.mode
        if self.mode == "truncate":
            return "truncate_keep_last" if self.keep_last_token else "truncate"
        return "flatten" if self.mode == "flatten" else f"reshape_{self.remainder}"


def fill_value(name: str, dtype: torch.dtype, pad_values: Mapping[str, float] | None, fills_label: bool) -> float:
    """The value of a slot without a source token: the caller's, else −100 for labels and 0 for other tensors."""
    if pad_values is None or name not in pad_values:
        if not fills_label or is_loss_mask(name):
            return 0
        may_be_input = own_name(name) == "y" or own_name(name).endswith("target_ids")
        if may_be_input or not dtype.is_signed or dtype.is_floating_point or dtype.is_complex:
            raise ValueError(f"pad_values must have a value for {name!r} ({dtype}), which may hold labels")
        return IGNORED_LABEL
    given = pad_values[name]
    given = given.item() if hasattr(given, "item") else given  # of NumPy
    if not isinstance(given, (bool, int, float)):
        raise TypeError(f"pad_values[{name!r}] must be a number, got {type(given).__name__}")
    if dtype.is_floating_point or dtype.is_complex:
        return given
    limits = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    fits = given == given // 1 and limits[0] <= given <= limits[1] and float(given) == given  # operators take floats
    if not fits:
        raise ValueError(f"pad_values[{name!r}] must fit {dtype} and float64, got {given}")
    return given
