"""A monitor of the optimizer in the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ..diagnostics import TrainingMonitor
from ..diagnostics.monitor import Output
from .monitoring import Monitoring

#: What a model gets where its loss is a part of the step's, not the mean of its batch.
_DIVISOR = "num_items_in_batch"

#: By their options: a callback that the Trainer makes of a checkpoint's JSON finds its outputs here.
_alive: WeakValueDictionary[tuple[float, int], Monitoring] = WeakValueDictionary()


class Monitor(TrainerCallback, ExportableState):
    """A `TrainingMonitor` of a Trainer's optimizer.

        Trainer(..., callbacks=[Monitor(JsonLines("monitor.jsonl"))])

    The loss is that of the optimizer step, as this rank's model returns it, over all batches that were accumulated.
    The norm is that of the gradients that the optimizer gets: after clipping, since a Trainer tells its callbacks no
    other. The process that logs writes. Checkpoints keep the counts; a training that resumes from a checkpoint without
    them counts from there on.

    Args:
        outputs, spike_threshold, read_every: as for `TrainingMonitor`.

    Raises:
        TypeError, ValueError: an argument does not fit; when training begins, the optimizer keeps no second moment; at
            the first step, the model returned no loss, since `label_smoothing_factor` or `compute_loss_func` is given.
    """

    def __init__(
        self,
        *outputs: Output,
        spike_threshold: float = 1.2,
        read_every: int = 20,
        _saved_options: Mapping[str, Any] | None = None,
    ) -> None:
        if _saved_options is None:
            self._monitoring = Monitoring(outputs, spike_threshold, read_every)
            _alive[spike_threshold, read_every] = self._monitoring
        else:
            self._monitoring = _monitoring_of(_saved_options)
        self._model: nn.Module | None = None
        self._hook: Any = None
        self._losses_are_parts = False

    @property
    def monitor(self) -> TrainingMonitor | None:
        """That of the training under way, or of the last one; None before the first."""
        return self._monitoring.monitor

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
        # A Trainer that saves looks for an entry, and a checkpoint that was written without this callback has none.
        saved = states.setdefault(type(self).__name__, self.state())
        self.counts = saved["attributes"]["counts"] if state.global_step else {}
        self._monitoring.start([optimizer], steps=state.global_step, writes=state.is_world_process_zero)
        self._model = model
        self._unhook()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._hook is None:  # behind the hooks of other callbacks, whatever their order: they may scale the loss
            assert self._model is not None
            self._hook = self._model.register_forward_hook(self._take_loss, with_kwargs=True)

    @torch._disable_dynamo  # stays outside of a compiled graph
    def _take_loss(self, model: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if not model.training:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else next(iter(outputs), None)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses_are_parts = kwargs.get(_DIVISOR) is not None
            self._monitoring.add_loss(loss)  # not a copy: a Trainer with several ranks scales it in place

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._monitoring.step(losses_are_parts=self._losses_are_parts)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._unhook()
        self._monitoring.close()

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    @property
    def counts(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return self._monitoring.state_dict()

    @counts.setter
    def counts(self, saved: dict[str, Any]) -> None:
        self._monitoring.saved = saved or None

    def state(self) -> dict[str, Any]:
        """For trainer_state.json: arguments and attributes of a callback like this one."""
        options = {"spike_threshold": self._monitoring.spike_threshold, "read_every": self._monitoring.read_every}
        return {"args": {"_saved_options": options}, "attributes": {"counts": self.counts}}


def _monitoring_of(options: Mapping[str, Any]) -> Monitoring:
    """A checkpoint holds no outputs: they are those of the callback to be replaced."""
    monitoring = _alive.get((options["spike_threshold"], options["read_every"]))
    if monitoring is None:
        raise ValueError(
            f"the checkpoint's Monitor has options that none of this training has, {dict(options)}; pass a Monitor "
            "with these, or leave restore_callback_states_from_checkpoint away: a Monitor resumes without it"
        )
    return monitoring
