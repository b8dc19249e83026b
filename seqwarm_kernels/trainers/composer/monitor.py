"""A monitor of the optimizer in Composer's trainer."""

from __future__ import annotations

from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from ...diagnostics import TrainingMonitor
from ...diagnostics.monitor import Output
from ..monitor_state import Monitoring

_LOSS = "loss/train/total"


class Monitor(Callback):
    """A `TrainingMonitor` of a Trainer's optimizer.

        Trainer(..., callbacks=Monitor(JsonLines("monitor.jsonl")))

    The loss is Composer's own of a batch, over all microbatches and ranks. The norm is that of the gradients that the
    optimizer got: after clipping. Rank zero writes. Checkpoints keep the counts; a training that resumes from a
    checkpoint without them counts from there on.

    Args:
        outputs, spike_threshold, read_every: as for `TrainingMonitor`.

    Raises:
        TypeError, ValueError: an argument does not fit; when training begins, there is more than one optimizer, or it
            keeps no second moment.
    """

    def __init__(self, *outputs: Output, spike_threshold: float = 1.2, read_every: int = 20) -> None:
        self._monitoring = Monitoring(outputs, spike_threshold, read_every)

    @property
    def monitor(self) -> TrainingMonitor | None:
        """That of the training under way, or of the last one; None before the first."""
        return self._monitoring.monitor

    def fit_start(self, state: State, logger: Logger) -> None:
        steps = state.timestamp.batch.value
        self._monitoring.start(state.optimizers, steps=steps, writes=dist.get_global_rank() == 0)

    def batch_end(self, state: State, logger: Logger) -> None:
        assert self.monitor is not None
        self.monitor.observe(state.total_loss_dict[_LOSS])

    def fit_end(self, state: State, logger: Logger) -> None:
        self._monitoring.close()

    def close(self, state: State, logger: Logger) -> None:
        self._monitoring.close()

    def state_dict(self) -> dict[str, Any]:
        return self._monitoring.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._monitoring.saved = state or None
