"""Memory of the caller that resized tensors are written to: `out=`, and `BatchBuffers`, which keep their addresses."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.resize_batch.schema import INFO_DTYPES, Kind, new_rows
from ..utils.checks import check_int
from ..utils.devices import is_capturing
from .containers import flatten_batch
from .layout import Layout, batch_layout
from .options import Options


class BatchBuffers(dict[str, Tensor]):
    """Memory for the outputs of `resize_batch(batch, seq_len, out=buffers)`, for every seq_len up to `max_seq_len`.

    A dict of each name to the flat memory of its tensor. Results are contiguous, and each name always has the same
    address, so a training step can be captured in one CUDA graph for each length. Each call overwrites the results of
    the previous call, the `ResizeInfo` included.

    With `device="cuda"` the batches may also lie in pinned host memory. The kernel then reads them there and copies
    only the tokens that it keeps. The buffers keep such a batch alive until the device has read it.

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
        entries = flatten_batch(example_batch)
        options = Options(mode, remainder, seq_dim, keys=keys, mask_keys=mask_keys)
        rule, layout = options.rule(), batch_layout(entries, options)
        tensors = {name: entries[name] for name in layout.axes}
        sizes = _max_sizes(layout, rule, tensors, max_seq_len)
        dtypes = [*(tensor.dtype for tensor in tensors.values()), *INFO_DTYPES]
        device = next(iter(tensors.values())).device if device is None else device
        storages = [torch.empty(size, dtype=dtype, device=device) for size, dtype in zip(sizes, dtypes, strict=True)]
        super().__init__(zip(tensors, storages, strict=False))
        self.device = storages[0].device
        self.info_storages = storages[len(tensors) :]
        self._being_read: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
        self._read_by_graphs: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Size of all buffers in bytes."""
        return sum(storage.nbytes for storage in (*self.values(), *self.info_storages))

    def keep_while_read(self, tensors: list[Tensor]) -> None:
        """Keep tensors in pinned memory, which is reused when nothing refers to it, while the device reads them."""
        if is_capturing(self.device):
            self._read_by_graphs += tensors  # for as long as the buffers
            return
        while self._being_read and self._being_read[0][0].query():
            self._being_read.popleft()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._being_read.append((event, tensors))


def _max_sizes(layout: Layout, rule: str, tensors: Mapping[str, Tensor], max_seq_len: int) -> list[int]:
    """Maximum number of elements over all lengths: of each resized tensor, then of each tensor of the info."""
    longest = min(max_seq_len, layout.source_length)
    rows = {length: new_rows(layout.batch_size, layout.source_length, length, rule) for length in range(1, longest + 1)}
    max_rows, max_tokens = max(rows.values()), max(rows[length] * length for length in rows)
    sizes = []
    for name, (kind, row_dim, token_dims) in layout.axes.items():
        shape = tensors[name].shape
        features = math.prod(size for dim, size in enumerate(shape) if dim != row_dim and dim not in token_dims)
        of_rows = max_tokens if kind in (Kind.SEQUENCE, Kind.LABEL) else max_rows
        sizes.append(of_rows * features * (longest**2 if kind == Kind.SQUARE else 1))  # these are only truncated
    return [*sizes, max_rows, max_tokens, 1]


def outputs_in(
    out: Mapping[str, Tensor],
    sources: Mapping[str, Tensor],
    shapes: Sequence[tuple[int, ...]],
    batch: Mapping[str, Any],
) -> list[Tensor]:
    """The tensors that a call writes: the first elements of the caller's tensors, then the info.

    `shapes` are those of the resized `sources`, then those of the info. Nothing in `batch` is to be overwritten.
    """
    device = out.device if isinstance(out, BatchBuffers) else next(iter(sources.values())).device
    outputs = {}
    for (name, source), shape in zip(sources.items(), shapes, strict=False):
        storage = out.get(name)
        if not isinstance(storage, Tensor):
            raise ValueError(f"out must hold a tensor {name!r} to write to, its names are {list(out)}")
        if storage.dtype != source.dtype or storage.device != device:
            wanted, got = f"{source.dtype} on {device}", f"{storage.dtype} on {storage.device}"
            raise ValueError(f"out[{name!r}] must be {wanted}, got {got}")
        if source.device.type != device.type and not source.is_pinned():
            raise ValueError(f"batch[{name!r}] must be on {device} or in pinned memory, got {source.device}")
        outputs[name] = _first_elements(name, storage, shape)
    _check_no_overlap(outputs, batch)
    info_shapes = shapes[len(sources) :]
    if isinstance(out, BatchBuffers):
        infos = zip(out.info_storages, info_shapes, strict=False)
        return [*outputs.values(), *(_first_elements("info", storage, shape) for storage, shape in infos)]
    dtypes = zip(info_shapes, INFO_DTYPES, strict=False)
    return [*outputs.values(), *(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in dtypes)]


def _first_elements(name: str, storage: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first elements of a contiguous tensor, as `shape`."""
    needed = math.prod(shape)
    if not storage.is_contiguous() or storage.numel() < needed:
        got = f"{storage.numel()}{'' if storage.is_contiguous() else ', not contiguous'}"
        raise ValueError(f"out[{name!r}] must be contiguous with at least {needed} elements for {shape}, got {got}")
    return storage.view(-1)[:needed].view(shape)


def _check_no_overlap(outputs: Mapping[str, Tensor], batch: Mapping[str, object]) -> None:
    """No output may share memory with an entry of the batch or with another output."""
    read = {
        value.untyped_storage().data_ptr()
        for value in batch.values()
        if type(value) is Tensor and value.layout == torch.strided and value.numel()
    }
    end, before = 0, ""
    for start, name in sorted((output.data_ptr(), name) for name, output in outputs.items()):
        if outputs[name].untyped_storage().data_ptr() in read:
            raise ValueError(f"out[{name!r}] must not share memory with an entry of batch")
        if start < end:
            raise ValueError(f"out[{name!r}] must not share memory with out[{before!r}]")
        end, before = start + outputs[name].nbytes, name
