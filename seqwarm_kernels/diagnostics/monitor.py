"""TrainingMonitor: an optimizer's moments and the loss of each step, read without waiting for the device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.moment_statistics.schema import Statistic
from .device_to_host import DelayedReader, Row
from .moments import existing, raw_statistics
from .optimizer_state import inner_optimizer, rank_sharding_of
from .records import RESERVED_NAMES, LossHistory, StepRecord

Output = Callable[[StepRecord], object]


class _HostValues(NamedTuple):
    """The values of a step that are on the host already."""

    step: int
    numbers: dict[str, float]
    names_on_device: list[str]  #: names of the numbers that follow the statistics in the step's row
    kinds: set[str]  #: what the statistics are taken from


class TrainingMonitor:
    """Reads an optimizer's moments after each of its steps, and passes a record of each step to its outputs.

    An optimizer is watched for what it has: numbers of a moment that it does not keep are None. Two optimizers, such as
    Muon for matrices and AdamW for all else, have a monitor each.

    Example::

        with TrainingMonitor(optimizer, JsonLines("monitor.jsonl")) as monitor:
            for batch in loader:
                loss = ...
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                monitor.observe(loss, grad_norm=norm)
                optimizer.zero_grad()

    The loss ratio of a step is its loss divided by the smallest loss of all earlier steps. A ratio above
    `spike_threshold` is a spike. Li, Zhang and He (arXiv 2108.06084) count spikes in this way, and found that the ratio
    moves with the largest √v. NaN and infinite losses are spikes without a ratio, and are never the smallest loss. If
    the smallest loss is not above zero, the ratio is NaN, and a finite loss is not a spike.

    No step waits for a device. Numbers stay on the device for `read_every` steps, are copied to the host during the
    next `read_every` steps, and then reach the outputs. On the CPU they reach the outputs after `read_every` steps.
    `flush()` reads all of them immediately.

    In distributed training every rank creates a monitor and calls it at each step, because statistics of sharded states
    (DTensor) are exchanged between ranks. Pass outputs only on the ranks that write. The loss is that of each rank,
    unless you pass the mean over ranks. FullyShardedDataParallel and DeepSpeed ZeRO keep plain tensors instead of
    DTensors: a warning says that statistics are then those of each rank's part.

    Args:
        optimizer: as in `moment_statistics`.
        outputs: callables that take a `StepRecord`, such as `JsonLines` and `TensorBoard`. `flush()` and `close()` of
            the monitor call the methods of the same name of each output that has them.
        spike_threshold: loss ratio above which a step is a spike, at least 1.
        read_every: number of steps that are read together.

    Attributes:
        steps: number of steps read.
        spikes: number of spikes among the steps read.
        min_loss: the smallest finite loss read; None before the first finite loss.
        max_loss_ratio: the largest finite ratio read; None before the first finite ratio.
        last_record: the record of the newest step read; None before the first.

    Raises:
        TypeError: `optimizer` is not an optimizer.
        ValueError: `optimizer` holds only this rank's part of the states.
    """

    def __init__(self, optimizer: Any, *outputs: Output, spike_threshold: float = 1.2, read_every: int = 20) -> None:
        inner_optimizer(optimizer)  # raises if it is none
        if sharding := rank_sharding_of(optimizer):
            warnings.warn(
                f"optimizer holds this rank's part of parameters that {sharding} shards: statistics and gradient norms "
                "are those of this part; under fully_shard they are those of the whole",
                stacklevel=2,
            )
        self._optimizer = optimizer
        self._outputs = outputs
        self._read_every = read_every
        self._reader = DelayedReader(read_every)
        self._history = LossHistory(float(spike_threshold))
        self._observed = 0
        self.last_record: StepRecord | None = None

    @torch.no_grad()
    def observe(
        self, loss: Tensor | float, grad_norm: Tensor | float | None = None, **extra_numbers: Tensor | float
    ) -> None:
        """Record a step. Call this right after `optimizer.step()`, before gradients are set to zero.

        Args:
            loss: the loss of the step; a number, or a tensor with one element, on any device.
            grad_norm: the gradient norm, for example the value that `clip_grad_norm_` returned. None computes the l2
                norm of the gradients in `.grad` in the same pass. After clipping, that is the norm of the clipped
                gradients, at most the clipping threshold: pass the value of `clip_grad_norm_` to see the norm before.
            extra_numbers: further numbers for the record, such as the learning rate or the sequence length. Numbers, or
                tensors with one element.

        Raises:
            TypeError: a value is neither a number nor a tensor.
            ValueError: a tensor does not have one element, or the name of an extra number is reserved.
        """
        given = {"loss": loss, **({} if grad_norm is None else {"grad_norm": grad_norm}), **extra_numbers}
        for name, value in given.items():
            if isinstance(value, Tensor) and value.numel() != 1:  # would move the numbers after it in the row
                raise ValueError(f"{name} must have one element, got {tuple(value.shape)}")
            if hasattr(value, "full_tensor"):  # a DTensor, which clip_grad_norm_ returns for sharded gradients
                given[name] = value.full_tensor()
        if reserved := RESERVED_NAMES & extra_numbers.keys():
            raise ValueError(f"extra_numbers must not use reserved names, got {', '.join(sorted(reserved))}")
        statistics, kinds = raw_statistics(self._optimizer, with_gradients=grad_norm is None)
        on_device = {
            name: value for name, value in given.items() if isinstance(value, Tensor) and value.device.type != "cpu"
        }
        on_host = {name: float(value) for name, value in given.items() if name not in on_device}
        self._observed += 1
        host_values = _HostValues(self._observed, on_host, list(on_device), kinds)
        self._emit(self._reader.add(Row(host_values, _concatenated(statistics, on_device.values()))))

    def flush(self) -> None:
        """Read all steps observed so far. Waits for the device."""
        _call_all([lambda: self._emit(self._reader.read_all()), lambda: self._call_outputs("flush")])

    def close(self) -> None:
        """Flush, and close the outputs."""
        _call_all([self.flush, lambda: self._call_outputs("close")])

    def __enter__(self) -> TrainingMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as closing:
            if error is None:
                raise
            # A warning, so that the training's own error is the one that is raised.
            warnings.warn(f"the monitor could not be closed: {closing!r}", stacklevel=2)

    @property
    def steps(self) -> int:
        return self._history.steps

    @property
    def spikes(self) -> int:
        return self._history.spikes

    @property
    def min_loss(self) -> float | None:
        return self._history.min_loss

    @property
    def max_loss_ratio(self) -> float | None:
        return self._history.max_loss_ratio

    def state_dict(self) -> dict[str, Any]:
        """The counts of all steps observed, as plain numbers. Flushes first."""
        self.flush()
        return self._history.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the counts of a saved state. Steps that were observed but not yet read are dropped.

        Raises:
            TypeError, ValueError: `state_dict` is not the state of a monitor. Nothing was changed.
        """
        self._history.load_state_dict(state_dict)
        self._observed = self._history.steps
        self.last_record = None
        self._reader = DelayedReader(self._read_every)

    def _emit(self, rows: list[tuple[_HostValues, list[float]]]) -> None:
        """Count every step, and pass its record to every output, even if an output raises."""
        records = [self._record(host_values, numbers) for host_values, numbers in rows]
        self.last_record = records[-1] if records else self.last_record
        _call_all([partial(output, record) for record in records for output in self._outputs])

    def _record(self, host_values: _HostValues, numbers: list[float]) -> StepRecord:
        statistics, others = numbers[: len(Statistic)], numbers[len(Statistic) :]
        variance_l1, variance_max, momentum_l1, momentum_max, squares = existing(statistics, host_values.kinds)
        values = {**dict(zip(host_values.names_on_device, others, strict=True)), **host_values.numbers}
        loss = values.pop("loss")
        ratio, is_spike = self._history.add(loss)
        return StepRecord(
            step=host_values.step,
            loss=loss,
            loss_ratio=ratio,
            is_spike=is_spike,
            variance_l1=variance_l1,
            variance_max=variance_max,
            momentum_l1=momentum_l1,
            momentum_max=momentum_max,
            grad_norm=values.pop("grad_norm", None if squares is None else math.sqrt(squares)),
            extra=values,
        )

    def _call_outputs(self, method: str) -> None:
        calls = [getattr(output, method, None) for output in self._outputs]
        _call_all([call for call in calls if callable(call)])


def _call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make all calls, even if one of them raises; errors are raised at the end."""
    with ExitStack() as stack:
        for call in reversed(list(calls)):
            stack.callback(call)


def _concatenated(statistics: Tensor, values: Iterable[Tensor]) -> Tensor:
    """Statistics and values as one tensor, on the device of the values.

    If the devices differ, the statistics are on the host, and copying them to the device does not wait.
    """
    columns = [value.reshape(1).to(statistics.dtype) for value in values]
    if not columns:
        return statistics
    device = columns[0].device
    return torch.cat([column.to(device, non_blocking=True) for column in (statistics, *columns)])
