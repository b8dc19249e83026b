"""A callback that the Hugging Face Trainer can restore from a checkpoint without making a new one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState


class RestorableCallback(TrainerCallback, ExportableState):
    """A callback that remains the same object when the Trainer restores callbacks from a checkpoint.

    With `restore_callback_states_from_checkpoint`, the Trainer replaces each callback by `type(callback)(**args)`, and
    then sets attributes. The checkpoint holds both as JSON, which has no outputs and no pacing functions. Each callback
    therefore gets its own class, which takes no arguments and returns this callback when it is called.
    """

    progress: dict[str, Any]  #: the state that a checkpoint keeps, and that the Trainer sets

    def __init__(self) -> None:
        _give_own_class(self)

    def state(self) -> dict[str, Any]:
        """The callback's entry in trainer_state.json."""
        return {"args": {}, "attributes": {"progress": self.progress}}

    def saved_progress(self, state: TrainerState) -> Any:
        """The progress in the checkpoint from which the Trainer resumes, or None if it has none of this callback."""
        states: Any = state.stateful_callbacks
        saved = states.get(type(self).__name__)
        return saved["attributes"]["progress"] if isinstance(saved, Mapping) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_state, (type(self).__bases__[0],), vars(self)


def _give_own_class(callback: RestorableCallback) -> None:
    kind, reference = type(callback), weakref.ref(callback)
    members = {"__new__": lambda cls: reference(), "__init__": lambda self: None, "__module__": kind.__module__}
    callback.__class__ = type(kind.__name__, (kind,), members)


def _without_state(kind: type[RestorableCallback]) -> RestorableCallback:
    """Makes a callback for `copy` and `pickle`, which cannot find its own class in a module."""
    callback = kind.__new__(kind)
    _give_own_class(callback)
    return callback
