"""Memory for resized batches that stays where it is while lengths grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.resize_batch import validation
from ..ops.resize_batch.schema import INFO_DTYPES, Kind
from ..utils.checks import check_int
from .checked_call import Options, Recipe, recipe_for
from .containers import leaves

_ALIGNMENT = 256  # bytes, as the CUDA allocator's own
_INFO_NAMES = ("valid_lengths", "position_ids", "num_valid_tokens")
_MOST_VIEWS = 4096  # of lengths; a ramp has some hundreds


class BatchBuffers(Mapping[str, Tensor]):
    """Owns the outputs of `resize_batch(batch, seq_len, out=buffers)` for every seq_len up to `max_seq_len`.

    The results are views of one piece of memory: of the exact size, contiguous, and always at the same address for
    each name, so that a training step may be captured once for each length in a CUDA graph. Each call overwrites what
    the one before it returned, the `ResizeInfo` included. Two lengths of one tensor share memory: buffers for two
    batches at a time are two objects.

    With `device="cuda"` the batches may also lie in pinned host memory. The kernel then reads them there, and moves
    only what it keeps. Such a batch is kept alive until the device has read it.

    As a mapping it gives the flat memory of each tensor by its name.

    Args:
        example_batch: a batch as training has it: names, dtypes, rows, and length at most as long.
        max_seq_len: the longest length of the ramp.
        mode, remainder, seq_dim, keys, mask_keys: as they will be given to `resize_batch`. "reshape" makes a padded
            batch larger than the source, so it needs more memory than "truncate".
        device: where the buffers lie; the batch's device by default.

    Raises:
        TypeError, ValueError: as `resize_batch`.
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
        check_int("max_seq_len", max_seq_len, minimum=1)
        found = leaves(example_batch)
        recipe = recipe_for(found, Options(mode, remainder, seq_dim, False, None, keys, mask_keys, None))
        tensors = {name: found[name] for name in recipe.names}
        sizes = _most_items(recipe, list(tensors.values()), recipe.length(max_seq_len))
        dtypes = [*(tensor.dtype for tensor in tensors.values()), *INFO_DTYPES]
        device = next(iter(tensors.values())).device if device is None else torch.device(device)
        self._memory, storages = _carve(sizes, dtypes, device)
        self._storages = dict(zip(recipe.names, storages, strict=False))
        self._info = storages[len(tensors) :]
        self._span = (self._memory.data_ptr(), self._memory.data_ptr() + self._memory.numel())
        self._views: dict[tuple[Recipe, int, bool], list[Tensor]] = {}
        self._being_read: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
        self._read_by_graphs: list[Tensor] = []

    @property
    def device(self) -> torch.device:
        return self._memory.device

    @property
    def nbytes(self) -> int:
        """Of all buffers."""
        return self._memory.numel()

    def __getitem__(self, name: str) -> Tensor:
        return self._storages[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._storages)

    def __len__(self) -> int:
        return len(self._storages)

    def views(self, recipe: Recipe, tensors: list[Tensor], length: int, return_info: bool) -> list[Tensor]:
        """The outputs of one call: views made once, and new tensors for them, which may be changed as any others.

        Raises:
            ValueError: they are too small, of another dtype or device, or `tensors` lie in them.
        """
        start, stop = self._span
        elsewhere = self.device.type != recipe.device_type
        for name, tensor in zip(recipe.names, tensors, strict=True):
            if start <= tensor.data_ptr() < stop:
                raise ValueError(f"batch[{name!r}] must not lie in the buffers that out= writes to")
            if elsewhere and not tensor.is_pinned():
                raise ValueError(
                    f"batch[{name!r}] must be on {self.device}, where out= writes, or in pinned host memory, got "
                    f"memory on {tensor.device} that is not pinned"
                )
        call = (recipe, length, return_info)
        if call not in self._views:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[call] = self._make_views(recipe, tensors, length, return_info)
        return [view.detach() for view in self._views[call]]

    def _make_views(self, recipe: Recipe, tensors: list[Tensor], length: int, return_info: bool) -> list[Tensor]:
        shapes = recipe.shapes(tensors, length, return_info)
        views = [
            validation.check_storage(name, self, tensor, shape, self.device)
            for name, tensor, shape in zip(recipe.names, tensors, shapes, strict=False)
        ]
        for name, storage, shape in zip(_INFO_NAMES, self._info, shapes[len(tensors) :], strict=False):
            views.append(validation.first_elements(f"the buffer of {name}", storage, shape))
        return views

    def keep_while_read(self, tensors: list[Tensor]) -> None:
        """Hold tensors in pinned memory, which is given out anew as soon as nobody does, until a launch is over; those
        that a graph reads for as long as the buffers."""
        if torch.cuda.is_current_stream_capturing():
            self._read_by_graphs += tensors
            return
        while self._being_read and self._being_read[0][0].query():
            self._being_read.popleft()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._being_read.append((event, tensors))


def _most_items(recipe: Recipe, tensors: list[Tensor], longest: int) -> list[int]:
    """For every tensor and the info: of how many items it is at most, over all lengths."""
    lengths = range(1, longest + 1)
    rows = max(recipe.rows(length) for length in lengths)
    tokens = max(recipe.rows(length) * length for length in lengths)
    sizes = []
    for tensor, kind in zip(tensors, recipe.kinds, strict=True):
        if kind == Kind.ROW:
            sizes.append(rows)
        elif kind == Kind.SQUARE:
            sizes.append(recipe.batch_size * longest * longest)
        else:
            sizes.append(tokens * torch.Size(tensor.shape[2:]).numel())
    return [*sizes, rows, tokens, 1]


def _carve(sizes: list[int], dtypes: list[torch.dtype], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Memory, and a flat tensor in it for each size."""
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
