"""Numbers of many steps, read from a device some steps later, so that no step waits for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .sharding import waits_for_nothing


class Row(NamedTuple):
    """What is known of a step."""

    about: Any  #: what the host knows
    numbers: Tensor  #: (N,), on the device; N may differ from row to row


class _Copy(NamedTuple):
    """A block of rows on its way to the host."""

    rows: list[Row]
    numbers: Tensor
    arrived: torch.cuda.Event | None


class Ring:
    """Rows go in; `length` of them are copied to the host together, and come out when the next ones are copied.

    On the CPU there is nothing to wait for, and rows come out as soon as there are `length` of them.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._rows: list[Row] = []
        self._underway: _Copy | None = None

    def put(self, row: Row) -> list[tuple[Any, list[float]]]:
        """Take a row in; the rows that came out: what the host knew, and the numbers."""
        self._rows.append(row)
        if len(self._rows) < self._length:
            return []
        earlier, copy = self._underway, self._start_copy()
        self._underway = copy if copy.arrived is not None else None
        return [*_read(earlier), *(_read(copy) if copy.arrived is None else [])]

    def take_all(self) -> list[tuple[Any, list[float]]]:
        """All rows, now: waits for the device."""
        earlier, self._underway = self._underway, None
        return [*_read(earlier), *(_read(self._start_copy()) if self._rows else [])]

    def _start_copy(self) -> _Copy:
        rows, self._rows = self._rows, []
        device = waits_for_nothing([row.numbers.device for row in rows])
        numbers = torch.cat([row.numbers.to(device, non_blocking=True) for row in rows])
        if not numbers.is_cuda:
            return _Copy(rows, numbers.cpu(), None)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(numbers.device))
        return _Copy(rows, host, arrived)


def _read(copy: _Copy | None) -> list[tuple[Any, list[float]]]:
    if copy is None:
        return []
    if copy.arrived is not None:
        copy.arrived.synchronize()
    sizes = [row.numbers.numel() for row in copy.rows]
    return [(row.about, part.tolist()) for row, part in zip(copy.rows, copy.numbers.split(sizes), strict=True)]
