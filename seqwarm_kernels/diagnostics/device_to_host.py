"""Numbers of several steps, read from a device some steps later, so that no step waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Row(NamedTuple):
    """The values of one step."""

    host_values: Any  #: values that are on the host already
    numbers: Tensor  #: (N,), on the device; N may differ from row to row


class _Copy(NamedTuple):
    """A block of rows that is being copied to the host."""

    rows: list[Row]
    numbers: Tensor
    arrived: torch.cuda.Event | None  #: None if the copy is complete


class DelayedReader:
    """Copies rows to the host in blocks of `length`, and returns a block when the next block is copied.

    On the CPU there is nothing to wait for: a block is returned as soon as it is full.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._rows: list[Row] = []
        self._pending: _Copy | None = None

    def add(self, row: Row) -> list[tuple[Any, list[float]]]:
        """Add a row. Returns the rows that have been read: host values, and numbers."""
        self._rows.append(row)
        if len(self._rows) < self._length:
            return []
        earlier, copy = self._pending, self._start_copy()
        self._pending = copy if copy.arrived is not None else None
        return [*_read(earlier), *(_read(copy) if copy.arrived is None else [])]

    def read_all(self) -> list[tuple[Any, list[float]]]:
        """Read all remaining rows. Waits for the device."""
        earlier, self._pending = self._pending, None
        return [*_read(earlier), *(_read(self._start_copy()) if self._rows else [])]

    def _start_copy(self) -> _Copy:
        rows, self._rows = self._rows, []
        device = gather_device([row.numbers.device for row in rows])
        numbers = torch.cat([row.numbers.to(device, non_blocking=True) for row in rows])
        if not numbers.is_cuda:
            return _Copy(rows, numbers.cpu(), None)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(numbers.device))
        return _Copy(rows, host, arrived)


def gather_device(devices: Sequence[torch.device]) -> torch.device:
    """The device on which to combine numbers from all `devices`.

    It is the first accelerator if there is one: the host could read a non-blocking copy before it has arrived.
    """
    return next((device for device in devices if device.type != "cpu"), devices[0])


def _read(copy: _Copy | None) -> list[tuple[Any, list[float]]]:
    if copy is None:
        return []
    if copy.arrived is not None:
        copy.arrived.synchronize()
    sizes = [row.numbers.numel() for row in copy.rows]
    return [(row.host_values, part.tolist()) for row, part in zip(copy.rows, copy.numbers.split(sizes), strict=True)]
