"""The monitor: an optimizer's moments and the loss after each step, without waiting for the device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..utils.checks import check_int, check_real
from .device_to_host import Ring, Row
from .losses import LossHistory
from .moments import raw_statistics
from .optimizer_state import check_optimizer
from .records import TAKEN, StepRecord

Output = Callable[[StepRecord], object]


class _About(NamedTuple):
    """What the host knows of a step."""

    step: int
    known: dict[str, float]  #: numbers that were numbers already
    on_device: list[str]  #: names of those that are in the row, behind the statistics
    has_gradients: bool  #: which the statistics are of


class TrainingMonitor:
    """Reads an optimizer after each of its steps, and tells its outputs what it read.

        with TrainingMonitor(optimizer, JsonLines("monitor.jsonl")) as monitor:
            for batch in loader:
                loss = ...
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                monitor.observe(loss, grad_norm=norm)
                optimizer.zero_grad()

    A loss ratio is the loss over the smallest of all steps before; one above `spike_threshold` is a spike, as Li, Zhang
    and He count them (arXiv 2108.06084), who found it to move with the largest √v. NaN and infinite losses are spikes,
    and never the smallest; where the smallest loss is not above zero there is no ratio (NaN), and no spike.

    Nothing waits for a device: numbers stay there for `read_every` steps, travel to the host beside the next ones, and
    reach the outputs after those; on a CPU, after `read_every` steps. `flush()` reads all at once.

    On several ranks every rank has a monitor and calls it at each step, since statistics of sharded states (DTensor)
    are exchanged; give outputs to the ranks that are to write. The loss is each rank's own, unless you pass their mean.

    Args:
        optimizer: as for `moment_statistics`.
        outputs: callables that take a `StepRecord`; `JsonLines`, `TensorBoard`. Their `flush` and `close`, where they
            have them, are called by the monitor's.
        spike_threshold: loss ratio, at least 1.
        read_every: steps.

    Attributes:
        steps, spikes: how many, of those that were read.
        min_loss: the smallest finite loss read; None before it.
        max_loss_ratio: the largest finite ratio read; None before it.

    Raises:
        TypeError, ValueError: an argument does not fit; `optimizer` keeps no second moment.
    """

    def __init__(self, optimizer: Any, *outputs: Output, spike_threshold: float = 1.2, read_every: int = 20) -> None:
        check_optimizer(optimizer)
        check_options(outputs, spike_threshold, read_every)
        self._optimizer = optimizer
        self._outputs = outputs
        self._read_every = read_every
        self._ring = Ring(read_every)
        self._history = LossHistory(spike_threshold)
        self._observed = 0

    @torch.no_grad()
    def observe(
        self, loss: Tensor | float, grad_norm: Tensor | float | None = None, **extra_numbers: Tensor | float
    ) -> None:
        """Right after `optimizer.step()`, before gradients are set to zero.

        Args:
            loss: of the step; a number, or a tensor with one element, on any device.
            grad_norm: what `clip_grad_norm_` returned, say. None: the l2 norm of the gradients as they lie in `.grad`,
                in the same pass; after clipping they are the clipped ones.
            extra_numbers: for the record: the learning rate, the sequence length. Numbers or tensors with one element.

        Raises:
            TypeError, ValueError: a number is none; a name is taken; `optimizer` keeps no second moment.
        """
        given = {"loss": loss, **({} if grad_norm is None else {"grad_norm": grad_norm}), **extra_numbers}
        for name, value in given.items():
            _check_number(name, value)
            if hasattr(value, "full_tensor"):  # a DTensor, as clip_grad_norm_ gives for sharded gradients
                given[name] = value.full_tensor()
        if taken := TAKEN & extra_numbers.keys():
            raise ValueError(f"extra_numbers must have names of their own, got {', '.join(sorted(taken))}")
        statistics, has_gradients = raw_statistics(self._optimizer, with_gradients=grad_norm is None)
        on_device = {
            name: value for name, value in given.items() if isinstance(value, Tensor) and value.device.type != "cpu"
        }
        known = {name: float(value) for name, value in given.items() if name not in on_device}
        self._observed += 1
        about = _About(self._observed, known, list(on_device), has_gradients)
        self._tell(self._ring.put(Row(about, _row(statistics, on_device.values()))))

    def flush(self) -> None:
        """Read all steps observed so far; waits for the device."""
        _all([lambda: self._tell(self._ring.take_all()), lambda: self._each_output("flush")])

    def close(self) -> None:
        """Flush, and close the outputs."""
        _all([self.flush, lambda: self._each_output("close")])

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
            warnings.warn(f"the monitor could not be closed: {closing!r}", stacklevel=2)  # beside the first error

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
        """Plain numbers, of all steps observed: flushes."""
        self.flush()
        return self._history.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Count on from there. Steps observed and not yet read are dropped.

        Raises:
            TypeError, ValueError: it is no state of a monitor; nothing was changed.
        """
        self._history.load_state_dict(state_dict)
        self._observed = self._history.steps
        self._ring = Ring(self._read_every)

    def _tell(self, read: list[tuple[_About, list[float]]]) -> None:
        """Every record is counted, and goes to every output, whichever of them raises."""
        records = [self._record(about, numbers) for about, numbers in read]
        _all([partial(output, record) for record in records for output in self._outputs])

    def _record(self, about: _About, numbers: list[float]) -> StepRecord:
        variance_l1, variance_max, momentum_l1, momentum_max, squares, *others = numbers
        values = {**dict(zip(about.on_device, others, strict=True)), **about.known}
        loss = values.pop("loss")
        ratio, is_spike = self._history.add(loss)
        return StepRecord(
            step=about.step,
            loss=loss,
            loss_ratio=ratio,
            is_spike=is_spike,
            variance_l1=variance_l1,
            variance_max=variance_max,
            momentum_l1=momentum_l1,
            momentum_max=momentum_max,
            grad_norm=values.pop("grad_norm", math.sqrt(squares) if about.has_gradients else None),
            extra=values,
        )

    def _each_output(self, method: str) -> None:
        calls = [getattr(output, method, None) for output in self._outputs]
        _all([call for call in calls if callable(call)])


def _all(calls: Iterable[Callable[[], object]]) -> None:
    """Make all of them, whatever one raises; the first error comes out at the end."""
    first: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def check_options(outputs: Sequence[Output], spike_threshold: float, read_every: int) -> None:
    """What `TrainingMonitor` wants, for those who make one later."""
    for output in outputs:
        if not callable(output):
            raise TypeError(f"outputs must be callables that take a StepRecord, got {type(output).__name__}")
    check_real("spike_threshold", spike_threshold)
    if spike_threshold < 1:
        raise ValueError(f"spike_threshold must be at least 1, got {spike_threshold}")
    check_int("read_every", read_every, minimum=1)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError(f"{name} must have one real element, got {value.dtype} {tuple(value.shape)}")
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number or a tensor with one element, got {type(value).__name__}")


def _row(statistics: Tensor, values: Iterable[Tensor]) -> Tensor:
    """All of it on the values' device: that of the statistics is the host, if they differ, which waits for nothing."""
    columns = [value.reshape(1).to(statistics.dtype) for value in values]
    if not columns:
        return statistics
    device = columns[0].device
    return torch.cat([column.to(device, non_blocking=True) for column in (statistics, *columns)])
