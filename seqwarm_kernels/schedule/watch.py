"""What listens to a schedule, and the listener that warns if the schedule has no effect."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..resizing.containers import cut_entries, flatten_batch
from ..resizing.entry_names import is_label, is_loss_mask
from ..utils.caller_warnings import warn_caller
from ..utils.devices import is_capturing

#: Batches, or steps, after which the watch warns. Assumes fewer micro-batches than this in an optimizer step.
PATIENCE = 500


class Schedule(Protocol):
    """What listeners know of a `SequenceLengthScheduler`."""

    max_seq_length: int
    listeners: list[ScheduleListener]

    @property
    def seq_length(self) -> int: ...


class ScheduleListener(Protocol):
    """An entry of `SequenceLengthScheduler.listeners`."""

    def on_step(self, schedule: Schedule) -> None:
        """The progress was changed, by `step` or by assignment."""

    def on_attach(self, schedule: Schedule) -> None:
        """The schedule was attached to a model."""

    def on_resize(self, schedule: Schedule, batch: Any, resized: Any) -> None:
        """`resize` has made `resized` of `batch`, also in the forward of an attached model. Not called in a trace."""


class ScheduleWatch:
    """Counts up to 500 batches, warns once if the schedule had no effect on them, and removes itself.

    It warns if `step` was never called, no batch was cut, all labels of a batch were cut off, or no batch came through
    an attached model in 500 steps. Values are read at the end alone, so no batch waits for a device. It also removes
    itself at the full length. A copy, and a pickle, starts anew.

    Attributes:
        batches: Batches that were resized.
        cut: Batches that lost tokens.
        with_labels: Cut batches that had a label which the loss does not ignore, or a token that its mask keeps.
        kept_label: Cut batches in which at least one of these is left.
        steps: Calls of `step`, and assignments of the progress.
    """

    def __init__(self) -> None:
        self.batches = self.cut = self.steps = 0
        self.with_labels: int | Tensor = 0  # on the device of the labels
        self.kept_label: int | Tensor = 0
        self._is_attached = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def on_attach(self, schedule: Schedule) -> None:
        self._is_attached = True

    def on_step(self, schedule: Schedule) -> None:
        self.steps += 1
        if self._is_attached and self.batches == 0 and self.steps >= PATIENCE:
            self._finish(schedule)

    def on_resize(self, schedule: Schedule, batch: Any, resized: Any) -> None:
        is_full_length = schedule.seq_length >= schedule.max_seq_length
        if not is_full_length:
            self._count(batch, resized)
        if is_full_length or self.batches >= PATIENCE:
            self._finish(schedule)

    def _count(self, batch: Any, resized: Any) -> None:
        self.batches += 1
        cut = list(cut_entries(batch, resized))
        # "segments" and "window" cut nothing and add entries.
        self.cut += bool(cut) or not flatten_batch(resized).keys() <= flatten_batch(batch).keys()
        had, kept = [], []
        for name, before, after in cut:
            counts = _comparison(name, after.dtype)
            if counts is not None and type(after) is Tensor and not after.is_meta:
                had.append(counts(before, 0).any())
                kept.append(counts(after, 0).any())
        if kept:
            self.with_labels = self.with_labels + torch.stack(had).any()
            self.kept_label = self.kept_label + torch.stack(kept).any()

    def _finish(self, schedule: Schedule) -> None:
        """Remove the watch, and warn of what it has counted."""
        if isinstance(self.kept_label, Tensor) and is_capturing(self.kept_label.device):
            return  # the next batch tries again
        schedule.listeners.remove(self)
        self.with_labels, self.kept_label = int(self.with_labels), int(self.kept_label)
        has_waited = max(self.batches, self.steps) >= PATIENCE
        has_no_effect = has_waited and not (self.batches and self.cut and self.steps)
        if has_no_effect or self.kept_label < self.with_labels:
            problem = "the schedule may have no effect" if has_no_effect else "all labels of some batches were cut off"
            labels = f"{self.kept_label} of {self.with_labels} with labels kept one, " if self.with_labels else ""
            warn_caller(
                f"{problem}: {self.batches} batches were resized to {schedule.seq_length} tokens, {self.cut} of them "
                f"were longer, {labels}and step() was called {self.steps} times"
            )


@functools.cache  # the entries of a training are few
def _comparison(name: object, dtype: torch.dtype) -> Callable[[Tensor, int], Tensor] | None:
    """How an entry compares with 0 where the loss counts a token. None for entries that do not tell."""
    if is_loss_mask(name):
        return operator.ne
    is_signed_int = dtype.is_signed and not dtype.is_floating_point and not dtype.is_complex
    return operator.ge if is_label(name) and is_signed_int else None  # a loss leaves out labels such as -100
