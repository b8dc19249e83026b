"""Memory for resized batches that keeps its address while lengths grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.resize_batch.schema import INFO_DTYPES, Kind, new_rows
from ..utils.checks import check_device, check_int
from ..utils.cuda import is_capturing
from .containers import flatten_batch, is_container
from .layout import Layout, batch_layout
from .options import resizing_rule
from .storage import check_storage, first_elements

_ALIGNMENT = 256  # bytes, as in the CUDA allocator
_INFO_NAMES = ("valid_lengths", "position_ids", "num_valid_tokens")
_MAX_CALLS_WITH_VIEWS = 4096  # a ramp has some hundred lengths


class BatchBuffers(Mapping[str, Tensor]):
    """Memory for the outputs of `resize_batch(batch, seq_len, out=buffers)`, for every seq_len up to `max_seq_len`.

    The results are views of one piece of memory. They are contiguous and of the exact size, and each name always has
    the same address, so a training step can be captured in one CUDA graph for each length. Each call overwrites the
    results of the previous call, the `ResizeInfo` included. All lengths of a tensor share memory: two batches at the
    same time need two `BatchBuffers`.

    With `device="cuda"` the batches may also lie in pinned host memory. The kernel then reads them there and copies
    only the tokens that it keeps. The buffers keep such a batch alive until the device has read it.

    As a mapping, `BatchBuffers` maps each name to the flat memory of its tensor.

    Args:
        example_batch: A batch with the names, dtypes and number of rows of the training batches, at least as long.
        max_seq_len: The maximum length of the ramp.
        mode, remainder, seq_dim, keys, mask_keys: As in the calls of `resize_batch`. "reshape" makes a padded batch
            larger than its source, so it needs more memory than "truncate".
        device: Device of the buffers. Default: the device of the batch.

    Attributes:
        device: Device of the buffers, with its index.

    Raises:
        TypeError, ValueError: As for `resize_batch`.
    """

    def __init__(
        self,
        example_batch: Any,
        max_seq_len: int,
        *,
        mode: str = "truncate",
        remainder: str = "drop",
        seq_dim: int = 1,
        keys: Collection[str] | None = None,
        mask_keys: Collection[str] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        max_seq_len = check_int("max_seq_len", max_seq_len, minimum=1)
        if not is_container(example_batch):
            raise TypeError(f"example_batch must be a mapping or a dataclass, got {type(example_batch).__name__}")
        entries = flatten_batch(example_batch)
        rule = resizing_rule(mode, remainder, keep_last_token=False)
        layout = batch_layout(entries, mode=mode, seq_dim=seq_dim, keys=keys, mask_keys=mask_keys)
        tensors = [entries[name] for name in layout.kinds]
        sizes = _max_sizes(layout, rule, tensors, max_seq_len)
        dtypes = [*(tensor.dtype for tensor in tensors), *INFO_DTYPES]
        device = tensors[0].device if device is None else check_device("device", device)
        self._memory, storages = _allocate(sizes, dtypes, device)
        self.device = self._memory.device
        self._storages = dict(zip(layout.kinds, storages, strict=False))
        self._info_storages = storages[len(tensors) :]
        self._address_range = (self._memory.data_ptr(), self._memory.data_ptr() + self._memory.numel())
        self._views: dict[Hashable, list[Tensor]] = {}
        self._being_read: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
        self._read_by_graphs: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Size of all buffers in bytes."""
        return self._memory.numel()

    def __getitem__(self, name: str) -> Tensor:
        return self._storages[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._storages)

    def __len__(self) -> int:
        return len(self._storages)

    def views(
        self, call: Hashable, names: Sequence[str], sources: list[Tensor], shapes: Callable[[], list[tuple[int, ...]]]
    ) -> list[Tensor]:
        """Views of the buffers, to be written by one call.

        The views of a call are made once. They are returned as new tensors each time, so the caller may change them.

        Args:
            call: Identifies the names, dtypes and shapes of the outputs.
            names: Names of the sources.
            sources: Tensors that the call reads.
            shapes: Returns the shape of every output: those of the sources, then those of the info.

        Raises:
            ValueError: A buffer is missing, too small, or of another dtype or device, or a source lies in the buffers.
        """
        self._check_sources(names, sources)
        views = self._views.get(call)
        if views is None:
            if len(self._views) >= _MAX_CALLS_WITH_VIEWS:
                self._views.clear()
            views = self._views[call] = self._make_views(names, sources, shapes())
        return [view.detach() for view in views]

    def _check_sources(self, names: Sequence[str], sources: list[Tensor]) -> None:
        start, stop = self._address_range
        must_be_pinned = sources[0].device.type != self.device.type
        for name, tensor in zip(names, sources, strict=True):
            if start <= tensor.data_ptr() < stop:
                raise ValueError(f"batch[{name!r}] must not lie in the buffers that out= writes to")
            if must_be_pinned and not tensor.is_pinned():
                raise ValueError(
                    f"batch[{name!r}] must be on {self.device}, where out= writes, or in pinned host memory, got "
                    f"memory on {tensor.device} that is not pinned"
                )

    def _make_views(self, names: Sequence[str], sources: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        views = [
            check_storage(name, self, source, shape, self.device)
            for name, source, shape in zip(names, sources, shapes, strict=False)
        ]
        for name, storage, shape in zip(_INFO_NAMES, self._info_storages, shapes[len(sources) :], strict=False):
            views.append(first_elements(f"the buffer of {name}", storage, shape))
        return views

    def keep_while_read(self, tensors: list[Tensor]) -> None:
        """Keep tensors in pinned memory alive until the current stream has read them.

        Pinned memory is reused as soon as nothing refers to it. Tensors that a CUDA graph reads are kept as long as
        the buffers.
        """
        if is_capturing(self.device):
            self._read_by_graphs += tensors
            return
        while self._being_read and self._being_read[0][0].query():
            self._being_read.popleft()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._being_read.append((event, tensors))


def _max_sizes(layout: Layout, rule: str, tensors: list[Tensor], max_seq_len: int) -> list[int]:
    """Maximum number of elements over all lengths: of each resized tensor, then of each tensor of the info."""
    longest = min(max_seq_len, layout.source_length)
    rows = {length: new_rows(layout.batch_size, layout.source_length, length, rule) for length in range(1, longest + 1)}
    max_rows = max(rows.values())
    max_tokens = max(rows[length] * length for length in rows)
    sizes = []
    for tensor, kind in zip(tensors, layout.kinds.values(), strict=True):
        if kind == Kind.ROW:
            sizes.append(max_rows)
        elif kind == Kind.SQUARE:
            sizes.append(layout.batch_size * longest * longest)
        else:
            sizes.append(max_tokens * torch.Size(tensor.shape[2:]).numel())
    return [*sizes, max_rows, max_tokens, 1]


def _allocate(sizes: list[int], dtypes: list[torch.dtype], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """One piece of memory, and a flat tensor in it for each size and dtype."""
    offsets, end = [], 0
    for size, dtype in zip(sizes, dtypes, strict=True):
        offsets.append(end)
        end += -(-size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, device=device)
    storages = [
        memory[offset : offset + size * dtype.itemsize].view(dtype)
        for offset, size, dtype in zip(offsets, sizes, dtypes, strict=True)
    ]
    return memory, storages
