"""A monitor of the optimizer in the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from ...diagnostics import TrainingMonitor
from ...diagnostics.monitor import Output
from ...utils.modules import NUM_ITEMS_IN_BATCH
from ..monitor_state import MonitorState
from .logs import LoggingCallback


class Monitor(LoggingCallback):
    """A `TrainingMonitor` of a Trainer's optimizer.

    Example::

        Trainer(..., callbacks=[Monitor(JsonLines("monitor.jsonl"))])

    The loss is that of the optimizer step, as this rank's model returns it: the mean over all forwards of the step,
    even if `compute_loss` adds up two of them, or their sum if the forwards get `num_items_in_batch`. The gradient norm
    is that before clipping if the Monitor was added by `add_to`. It is that after clipping for a Monitor in
    `callbacks`, since the Trainer calls no callback between backward and clipping. The process that logs writes.
    Checkpoints keep the counts. If a checkpoint has no counts, a training that resumes from it starts to count there.

    Every log gets the figures of the newest record that was read, "monitor/loss_ratio" and so on, which is up to
    2 · `read_every` steps old: "monitor/step" says of which step. "monitor/spikes" is the number of spikes up to it.
    The Trainer calls its reporters before the callbacks that are passed to it. To have the figures reported, call
    `monitor.add_to(trainer)` instead of passing the callback.

    Args:
        outputs, spike_threshold, read_every: as for `TrainingMonitor`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; at the first step, the model returned no loss, because
            `label_smoothing_factor` or `compute_loss_func` is given.
    """

    def __init__(self, *outputs: Output, spike_threshold: float = 1.2, read_every: int = 20) -> None:
        super().__init__()
        self._monitor_state = MonitorState(outputs, spike_threshold, read_every)
        self._options = {  # plain numbers: the Trainer saves them as JSON
            "spike_threshold": self._monitor_state.spike_threshold,
            "read_every": self._monitor_state.read_every,
        }
        self._model: nn.Module | None = None
        self._hook: Any = None
        self._losses_are_parts = False

    @property
    def monitor(self) -> TrainingMonitor | None:
        """The monitor of the current training, or of the last one; None before the first."""
        return self._monitor_state.monitor

    def add_to(self, trainer: Trainer) -> None:
        """Adds the callback to a Trainer, and its figures to what reporters get. Takes norms before clipping.

        Raises:
            ValueError: the trainer has this callback already, or the callback was added before.
        """
        super().add_to(trainer)
        norm_of = trainer._get_grad_norm  # computes it, unless clipping has

        def keep_norm(*args: Any, **kwargs: Any) -> Any:
            norm = self._monitor_state.grad_norm = norm_of(*args, **kwargs)
            return norm

        trainer.__dict__["_get_grad_norm"] = keep_norm

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        states: Any = state.stateful_callbacks
        name = type(self).__name__
        entries = _entries(states.get(name))
        of_monitors = [progress for progress in map(_progress_of, entries) if progress is not None]
        of_same_options = [progress for progress in of_monitors if progress["options"] == self._options]
        found = (of_same_options or of_monitors)[-1:] if state.global_step else []  # the Trainer appends newer entries
        self._monitor_state.saved = (found[0]["counts"] or None) if found else None
        self._monitor_state.start([optimizer], steps=state.global_step, writes=state.is_world_process_zero)
        if not of_same_options:  # a Trainer that saves needs an entry; entries of other callbacks stay beside it
            states[name] = [*entries, self.state()] if entries else self.state()
        self._model = model
        self._unhook()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._hook is None:  # after the hooks of all other callbacks, which may scale the loss
            assert self._model is not None
            self._hook = self._model.register_forward_hook(self._take_loss, with_kwargs=True)

    @torch._disable_dynamo  # stays outside of a compiled graph
    def _take_loss(self, model: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if not model.training:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else next(iter(outputs), None)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses_are_parts = kwargs.get(NUM_ITEMS_IN_BATCH) is not None  # then not means of their batches
            self._monitor_state.add_loss(loss)  # not a copy: a Trainer with several ranks scales it in place

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._monitor_state.step(losses_are_parts=self._losses_are_parts)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._unhook()
        self._monitor_state.close()

    def figures(self) -> dict[str, float]:
        """Figures of the newest record that was read; empty outside of a training."""
        return {} if self._hook is None else self._monitor_state.figures()

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    @property
    def progress(self) -> dict[str, Any]:
        """The state that a checkpoint keeps."""
        return {"options": self._options, "counts": self._monitor_state.state_dict()}

    @progress.setter
    def progress(self, saved: dict[str, Any]) -> None:
        """Checks the options; `on_train_begin` takes the counts."""
        if not _is_progress(saved):
            raise ValueError(f"progress must be that of a Monitor, with the entries options and counts, got {saved!r}")
        if saved["options"] != self._options:
            raise ValueError(
                f"the checkpoint's Monitor has other options than this training's: {saved['options']}; pass Monitors "
                "with the checkpoint's options, in its order, or do not set restore_callback_states_from_checkpoint: a "
                "Monitor resumes without it"
            )


def _entries(saved: Any) -> list[Mapping[str, Any]]:
    """Returns the entries of all callbacks of one class name: the Trainer saves a list if there is more than one."""
    return [entry for entry in (saved if isinstance(saved, list) else [saved]) if isinstance(entry, Mapping)]


def _progress_of(entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the `progress` in a Monitor's entry, or None for the entry of another class with the same name."""
    progress = (entry.get("attributes") or {}).get("progress")
    return progress if _is_progress(progress) else None


def _is_progress(value: object) -> bool:
    return isinstance(value, Mapping) and value.keys() == {"options", "counts"}
