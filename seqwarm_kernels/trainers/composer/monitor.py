"""A monitor of the optimizer in Composer's trainer."""

from __future__ import annotations

from typing import Any

from composer.algorithms import GradientClipping
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from ...diagnostics.moments import gradient_norm
from ..monitor_state import MonitorState

_LOSS = "loss/train/total"


class Monitor(MonitorState, Callback):
    """A `TrainingMonitor` of a Trainer's optimizer.

    Example::

        Trainer(..., callbacks=Monitor(JsonLines("monitor.jsonl")))

    The loss is Composer's loss of the batch, over all microbatches and ranks. The gradient norm is that of the
    gradients that the optimizer gets. With Composer's `GradientClipping` it is that before clipping, computed after
    each microbatch. Rank zero writes. Checkpoints keep the counts. If a checkpoint has no counts, a training that
    resumes from it starts to count there.

    Loggers get the figures of the newest record, "monitor/step" and so on.

    Args:
        outputs, spike_threshold, read_every: as for `TrainingMonitor`.

    Attributes:
        monitor: the monitor of the current training, or of the last one; None before the first.

    Raises:
        TypeError, ValueError: `TrainingMonitor` refuses an argument.
        ValueError: when training begins, there is more than one optimizer.
    """

    def fit_start(self, state: State, logger: Logger) -> None:
        steps = state.timestamp.batch.value
        self._start(state.optimizers, steps=steps, writes=dist.get_global_rank() == 0)

    def after_backward(self, state: State, logger: Logger) -> None:
        """Takes the norm after each microbatch: algorithms run before callbacks when all of them are done."""
        self._grad_norm = None
        if any(isinstance(algorithm, GradientClipping) for algorithm in state.algorithms):
            norm = gradient_norm(state.optimizers[0])
            is_scaled = norm is not None and state.scaler is not None and state.scaler.is_enabled()
            self._grad_norm = norm / state.scaler.get_scale() if is_scaled else norm

    def batch_end(self, state: State, logger: Logger) -> None:
        assert self.monitor is not None
        self.monitor.observe(state.total_loss_dict[_LOSS], self._grad_norm)
        logger.log_metrics(self.figures())

    def fit_end(self, state: State, logger: Logger) -> None:
        self._close()

    def close(self, state: State, logger: Logger) -> None:
        self._close()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state or None
