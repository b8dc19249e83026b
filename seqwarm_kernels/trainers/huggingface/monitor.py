"""A monitor of the optimizer in the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import TrainerControl, TrainerState, TrainingArguments

from ..monitor_state import MonitorState
from .added import AddedCallback


class Monitor(MonitorState, AddedCallback):
    """A `TrainingMonitor` of a Trainer's optimizer.

    Example::

        trainer = Trainer(...)
        Monitor(JsonLines("monitor.jsonl")).add_to(trainer)

    The loss is the Trainer's own of the optimizer step, on this rank. The gradient norm is that before clipping. The
    process that logs writes. Checkpoints keep the counts of each `spike_threshold`. If a checkpoint has none, a
    training that resumes from it starts to count there. Every log gets the figures of the newest record, "monitor/step"
    and so on.

    Args:
        outputs, spike_threshold, read_every: as for `TrainingMonitor`.

    Attributes:
        monitor: the monitor of the current training, or of the last one; None before the first.

    Raises:
        TypeError, ValueError: `TrainingMonitor` refuses an argument, or the Monitor was passed in `callbacks`.
    """

    @property
    def name_in_checkpoint(self) -> str:
        """Monitors of one threshold have equal counts."""
        return f"{super().name_in_checkpoint}(spike_threshold={self._spike_threshold})"

    def take_grad_norm(self, norm: Any) -> None:
        self._grad_norm = norm

    def take_loss(self, loss: Tensor) -> None:
        self._add_loss(loss)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._saved = (self.saved_state(state) or None) if state.global_step else None
        self._start([kwargs["optimizer"]], steps=state.global_step, writes=state.is_world_process_zero)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step(losses_are_parts=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._close()
