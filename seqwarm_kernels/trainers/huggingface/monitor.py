"""A monitor of the optimizer in the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ...diagnostics import TrainingMonitor
from ...diagnostics.monitor import Output
from ..monitor_state import Monitoring

#: What a model gets where its loss is a part of the step's, not the mean of its batch.
_DIVISOR = "num_items_in_batch"

_OPTIONS = "_saved_options"


class Monitor(TrainerCallback, ExportableState):
    """A `TrainingMonitor` of a Trainer's optimizer.

        Trainer(..., callbacks=[Monitor(JsonLines("monitor.jsonl"))])

    The loss is that of the optimizer step, as this rank's model returns it: the mean over all its forwards of the step,
    also where `compute_loss` adds up two of them; the sum where they are given `num_items_in_batch`. The norm is that
    of the gradients that the optimizer gets: after clipping, since a Trainer tells its callbacks no other. The process
    that logs writes. Checkpoints keep the counts; a training that resumes from a checkpoint without them counts from
    there on.

    Args:
        outputs, spike_threshold, read_every: as for `TrainingMonitor`.

    Raises:
        TypeError, ValueError: an argument does not fit; when training begins, the optimizer keeps no second moment; at
            the first step, the model returned no loss, since `label_smoothing_factor` or `compute_loss_func` is given.
    """

    _replaced: ClassVar[Monitoring]

    def __init__(
        self,
        *outputs: Output,
        spike_threshold: float = 1.2,
        read_every: int = 20,
        _saved_options: Mapping[str, Any] | None = None,
    ) -> None:
        if _saved_options is None:
            self._monitoring = Monitoring(outputs, spike_threshold, read_every)
            self.__class__ = _class_of(type(self), self._monitoring)
        else:
            self._monitoring = _monitoring_of(type(self), _saved_options)
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
        name = type(self).__name__
        entries = _entries(states.get(name))
        of_monitors = [entry for entry in entries if _OPTIONS in (entry.get("args") or {})]
        of_such = [entry for entry in of_monitors if entry["args"][_OPTIONS] == self._options]
        saved = (of_such or of_monitors)[-1:] if state.global_step else []  # the Trainer appends newer ones
        self.counts = saved[0]["attributes"]["counts"] if saved else {}
        self._monitoring.start([optimizer], steps=state.global_step, writes=state.is_world_process_zero)
        if not of_such:  # a Trainer that saves looks for an entry; those of others stay beside it
            states[name] = [*entries, self.state()] if entries else self.state()
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
        return {"args": {_OPTIONS: self._options}, "attributes": {"counts": self.counts}}

    @property
    def _options(self) -> dict[str, Any]:
        return _options_of(self._monitoring)

    def __reduce__(self) -> tuple[Any, ...]:
        return _bare, (type(self).__bases__[0], self._monitoring), vars(self)


def _class_of(kind: type[Monitor], monitoring: Monitoring) -> type[Monitor]:
    """One for each Monitor: a Trainer that restores calls the class of the callback it replaces, and says no more."""
    return type(kind.__name__, (kind,), {"_replaced": monitoring, "__module__": kind.__module__})


def _bare(kind: type[Monitor], monitoring: Monitoring) -> Monitor:
    """For copies, whose class has no place in a module."""
    return kind.__new__(_class_of(kind, monitoring))


def _options_of(monitoring: Monitoring) -> dict[str, Any]:
    return {"spike_threshold": monitoring.spike_threshold, "read_every": monitoring.read_every}


def _entries(saved: Any) -> list[Mapping[str, Any]]:
    """Of all callbacks whose classes have one name: the Trainer makes it a list where there is more than one."""
    return [entry for entry in (saved if isinstance(saved, list) else [saved]) if isinstance(entry, Mapping)]


def _monitoring_of(kind: type[Monitor], options: Mapping[str, Any]) -> Monitoring:
    """A checkpoint holds no outputs: they are those of the callback to be replaced."""
    monitoring: Monitoring = kind._replaced
    if dict(options) != _options_of(monitoring):
        raise ValueError(
            f"the checkpoint's Monitor has other options than this training's: {dict(options)}; pass Monitors with the "
            "checkpoint's options, in its order, or leave restore_callback_states_from_checkpoint away: a Monitor "
            "resumes without it"
        )
    return monitoring
