"""Copies between GPUs and pageable host memory, through pinned buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import cycle

import torch
from torch import Tensor

#: Size of a buffer.
_BYTES = 2**24


class PinnedBuffers:
    """Two buffers in pinned memory. While a GPU copies one of them, the CPU copies the other.

    Raises:
        RuntimeError: The driver does not pin the buffers.
    """

    def __init__(self) -> None:
        try:
            self.buffers = [torch.empty(_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
        except RuntimeError as error:
            raise RuntimeError(
                "warmup_allocator copies tensors of a GPU through two buffers in pinned host memory, "
                f"which the driver does not allocate: {error}"
            ) from error

    def save(self, tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each first tensor, on a GPU, into the second, in pageable memory. All are contiguous."""
        under_way: deque[tuple[torch.cuda.Event, Tensor, Tensor]] = deque()

        def finish_first() -> None:
            arrived, pinned, copied = under_way.popleft()
            arrived.synchronize()
            copied.copy_(pinned)

        for (tensor, copied), buffer in zip(_pieces(tensors), cycle(self.buffers), strict=False):
            if len(under_way) == len(self.buffers):
                finish_first()
            pinned = buffer[: tensor.nbytes].view(tensor.dtype)
            pinned.copy_(tensor, non_blocking=True)
            under_way.append((torch.cuda.current_stream(tensor.device).record_event(), pinned, copied))
        while under_way:
            finish_first()

    def restore(self, tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each second tensor back into the first."""
        under_way: deque[torch.cuda.Event] = deque()
        for (tensor, copied), buffer in zip(_pieces(tensors), cycle(self.buffers), strict=False):
            if len(under_way) == len(self.buffers):
                under_way.popleft().synchronize()
            pinned = buffer[: tensor.nbytes].view(tensor.dtype)
            pinned.copy_(copied)
            tensor.copy_(pinned, non_blocking=True)
            under_way.append(torch.cuda.current_stream(tensor.device).record_event())
        for event in under_way:
            event.synchronize()


def _pieces(tensors: Iterable[tuple[Tensor, Tensor]]) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield pieces of both tensors that fit into a buffer."""
    for tensor, copied in tensors:
        size = _BYTES // tensor.element_size()
        # Through `data`, so that autograd sees no change: the contents become those of before the passes.
        yield from zip(tensor.data.view(-1).split(size), copied.view(-1).split(size), strict=True)
