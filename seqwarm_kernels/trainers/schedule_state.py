"""What the callbacks of all trainers share: the schedule's steps, the tokens of all ranks, what a checkpoint keeps."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..resizing.functional import resize_batch
from ..schedule.attachment import Attachment, Seen
from ..schedule.scheduler import SequenceLengthScheduler
from ..utils.checks import check_int

_WAY_OUT = "or start a new training from the checkpoint's weights"


class Progress:
    """A schedule on its way through a training.

    Args:
        scheduler: what is stepped.
        resize_options: for `resize_batch`.

    Attributes:
        attachment: that of the training under way, else None.
        train_tokens: how many tokens all ranks have trained on, after resizing and without padding.

    Raises:
        TypeError: `scheduler` is none, or `resize_batch` does not take an option.
    """

    def __init__(self, scheduler: SequenceLengthScheduler, resize_options: Mapping[str, Any]) -> None:
        if not isinstance(scheduler, SequenceLengthScheduler):
            raise TypeError(f"scheduler must be a SequenceLengthScheduler, got {type(scheduler).__name__}")
        inspect.signature(resize_batch).bind(None, scheduler.seq_length, **resize_options)
        self.scheduler = scheduler
        self.attachment: Attachment | None = None
        self.train_tokens = 0
        self._options = dict(resize_options)
        self._start: int | None = None
        self._is_counted = True

    def attach(self, model: nn.Module) -> Attachment:
        """Resize what `model` trains on, and no longer what a training that broke off has left attached."""
        self.detach()
        self.attachment = self.scheduler.attach(model, **self._options)
        return self.attachment

    def detach(self) -> None:
        if self.attachment is not None:
            self.attachment.remove()
        self.attachment = None

    def start(self) -> None:
        """A training that does not resume, also after one that broke off: the schedule stands where it first stood."""
        self.scheduler.progress = self._remembered_start()
        self.train_tokens = 0

    def resume(self, state_dict: Any) -> None:
        """A training goes on from a checkpoint, of which this is the entry; None if it has none.

        Raises:
            ValueError: there is no entry, or it is of another configuration; nothing was changed.
        """
        if state_dict is None:
            raise ValueError(
                "the checkpoint has no state of SequenceLengthWarmup, since it was written without this callback; "
                f"resume without it, {_WAY_OUT}"
            )
        self._remembered_start()
        try:
            train_tokens = state_dict["train_tokens"]
            check_int("train_tokens", train_tokens, minimum=0)
            self.scheduler.load_state_dict(state_dict["scheduler"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the checkpoint's state of SequenceLengthWarmup does not fit: {error}; pass a scheduler of the "
                f"checkpoint's configuration, {_WAY_OUT}"
            ) from error
        self.train_tokens = train_tokens

    def step(self, steps: int, device: torch.device, *, count: bool = True) -> None:
        """So many optimizer steps were made, by every rank.

        Args:
            steps: how many.
            device: where the ranks exchange what they saw.
            count: False lets steps be counted without waiting for the device and the ranks: tokens come later.
        """
        unit = self.scheduler.unit
        self._is_counted = count or unit != "step"
        seen = self._count(device) if self._is_counted else Seen(0, 0)
        self.scheduler.step({"step": steps, "token": seen.tokens, "sample": seen.samples}[unit])

    def settle(self, device: torch.device) -> None:
        """Count the tokens of steps that were left uncounted."""
        if self.scheduler.unit == "step":
            self._count(device)

    def _count(self, device: torch.device) -> Seen:
        """What all ranks saw since the last time."""
        if self.attachment is None:
            return Seen(0, 0)
        seen = self.attachment.take_seen()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            total = torch.tensor(seen, device=device)
            torch.distributed.all_reduce(total)
            seen = Seen(*total.tolist())
        self.train_tokens += seen.tokens
        return seen

    def metrics(self) -> dict[str, int]:
        """Of the steps behind us; `train_tokens` only where the last one was counted."""
        trained_with = None if self.attachment is None else self.attachment.seq_length
        length = {"seq_length": trained_with or self.scheduler.seq_length}
        return {**length, "train_tokens": self.train_tokens} if self._is_counted else length

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {"scheduler": self.scheduler.state_dict(), "train_tokens": self.train_tokens}

    def _remembered_start(self) -> int:
        if self._start is None:
            self._start = self.scheduler.progress
        return self._start
