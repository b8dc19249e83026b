"""What listens to a schedule, and the listener that warns if the schedule has no effect."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from ..resizing.containers import cut_entries
from ..resizing.entry_names import is_label, is_loss_mask
from ..utils.caller_warnings import warn_caller

#: Batches, or steps, after which the watch warns. More than a step accumulates.
PATIENCE = 500


class Schedule(Protocol):
    """What listeners know of a `SequenceLengthScheduler`."""

    max_seq_length: int
    listeners: list[ScheduleListener]

    @property
    def seq_length(self) -> int: ...


class ScheduleListener(Protocol):
    """An entry of `SequenceLengthScheduler.listeners`. Nothing is called while torch.compile traces."""

    def on_step(self, schedule: Schedule) -> None:
        """The progress was changed, by `step` or by assignment."""

    def on_attach(self, schedule: Schedule) -> None:
        """The schedule was attached to a model."""

    def on_resize(self, schedule: Schedule, batch: Any, resized: Any) -> None:
        """`resize` has made `resized` of `batch`, also in the forward of an attached model."""


class ScheduleWatch:
    """Counts up to 500 batches, warns once if the schedule had no effect on them, and removes itself.

    It warns if the progress never changed, no batch was cut, all labels of a batch were cut off, or no batch came
    through an attached model in 500 steps. Values are read at the end alone, so no batch waits for a device. It also
    removes itself at the full length. A copy, and a pickle, starts anew.

    Attributes:
        batches: Batches that were resized.
        cut: Batches that lost tokens.
        with_labels: Batches of these that have entries with labels, or with a mask of the loss.
        kept_label: Batches of these in which a label is left that the loss does not ignore.
        steps: Changes of the progress.
    """

    def __init__(self) -> None:
        self.batches = self.cut = self.with_labels = self.steps = 0
        self.kept_label: int | Tensor = 0  # on the device of the labels
        self._is_attached = False

    def __reduce__(self) -> tuple[Any, ...]:
        return ScheduleWatch, ()

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
        was_cut, kept = False, []
        for name, _, after in cut_entries(batch, resized):
            was_cut = True
            if is_loss_mask(name):
                kept.append((after > 0).any())
            elif is_label(name) and not after.is_floating_point():
                kept.append((after >= 0).any())  # a loss leaves out negative labels, such as -100
        self.cut += was_cut
        if kept:
            self.with_labels += 1
            self.kept_label = self.kept_label + functools.reduce(torch.logical_or, kept)

    def _finish(self, schedule: Schedule) -> None:
        """Remove the watch, and warn of what it has counted."""
        schedule.listeners.remove(self)
        self.kept_label = int(self.kept_label)
        has_waited = max(self.batches, self.steps) >= PATIENCE
        has_no_effect = has_waited and not (self.batches and self.cut and self.steps)
        if has_no_effect or self.kept_label < self.with_labels:
            labels = f"{self.kept_label} of {self.with_labels} with labels kept one, " if self.with_labels else ""
            warn_caller(
                f"the schedule may have no effect: {self.batches} batches were resized to {schedule.seq_length} "
                f"tokens, {self.cut} of them were longer, {labels}and step() was called {self.steps} times"
            )
