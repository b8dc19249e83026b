"""A callback whose figures are in the logs of the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from .restorable import RestorableCallback


class LoggingCallback(RestorableCallback):
    """A callback that adds figures to each log of a training.

    The Trainer calls its reporters before the callbacks that are passed to it, and no event gives a callback the
    Trainer. Reporters therefore get the figures only of a callback that was added by `add_to`, or that is passed before
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._was_added = False

    def figures(self) -> dict[str, Any]:
        """Figures for a log, by name; empty outside of a training."""
        return {}

    def add_to(self, trainer: Trainer) -> None:
        """Adds the callback to a Trainer, and its figures to what the Trainer's reporters get.

        Do not pass the callback in `callbacks`, too.

        Raises:
            ValueError: the trainer has this callback already, or the callback was added before.
        """
        if self in trainer.callback_handler.callbacks:
            raise ValueError("trainer must not have this callback yet: leave it out of callbacks, and add it once")
        if self._was_added:
            raise ValueError(
                "add_to must be called once, got a callback that was added to another Trainer, or was removed from "
                f"this one: make a new {type(self).__name__}"
            )
        self._was_added = True
        trainer.add_callback(self)
        log = trainer.log

        def log_figures(logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            if self in trainer.callback_handler.callbacks:  # until `trainer.remove_callback`
                logs.update(self.figures())
            log(logs, *args, **kwargs)

        trainer.__dict__["log"] = log_figures

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None:
            for record in (logs, *state.log_history[-1:]):  # the history has an earlier copy of the logs
                record.update(self.figures())
