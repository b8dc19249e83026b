"""Memory: own the worst case before the first step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from tqdm.auto import tqdm

from .batch import resize_batch
from .checks import check_int
from .example_batch import ExampleBatch, as_given, as_mapping, call_model, guess_batch, stretched
from .schedule import SequenceLengthScheduler
from .snapshot import preserved

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class AllocatorReport:
    """What `warmup_allocator` did. Bytes are the device's; on the CPU the resident set of the process."""

    device: str
    batch_size: int
    lengths: tuple[int, ...]  #: in the order passed: max_len first
    seconds: float
    peak_bytes: int  #: the most in use at any time
    reserved_bytes: int | None  #: what the allocator owns from now on; None on the CPU
    device_allocations: int | None  #: how often memory was asked of the device; None on the CPU

    def __str__(self) -> str:
        lengths = f"{self.lengths[0]}"
        if len(self.lengths) > 1:
            lengths += f", then {len(self.lengths) - 1} from {self.lengths[1]} to {self.lengths[-1]}"
        rows = [
            ("device", self.device),
            ("batch size", str(self.batch_size)),
            ("lengths passed", lengths),
            ("peak memory", f"{self.peak_bytes / 2**20:,.0f} MiB"),
            ("time", f"{self.seconds:.2f} s"),
        ]
        if self.reserved_bytes is not None:
            rows.append(("owned from now on", f"{self.reserved_bytes / 2**20:,.0f} MiB"))
        if self.device_allocations is not None:
            rows.append(("device allocations", str(self.device_allocations)))
        return "\n".join(["warmup_allocator", *(f"  {name:<20}{value}" for name, value in rows)])


def warmup_allocator(
    model: nn.Module,
    max_len: int,
    *,
    batch_size: int | None = None,
    example_batch: ExampleBatch | None = None,
    loss_fn: LossFunction | None = None,
    optimizer: Optimizer | None = None,
    autocast_dtype: torch.dtype | None = None,
    scheduler: SequenceLengthScheduler | None = None,
    resize_options: Mapping[str, Any] | None = None,
) -> AllocatorReport:
    """Train once at `max_len`, so that memory is claimed and kernels are compiled; then put everything back.

    PyTorch's caching allocator serves growing sequences badly: each new length asks the device for blocks that
    no earlier one left behind. After the longest length has passed, shorter ones fit into what is there.

    Afterwards parameters, buffers, gradients (None stays None), random streams, train/eval flags, the optimizer
    and the scheduler are bit for bit as before, also after an exception. Copies of them are held in host memory
    meanwhile. Hooks of the model and the optimizer fire.

    Args:
        model: any module; put into train mode if it is in eval mode.
        max_len: the longest sequence of the training to come.
        batch_size: rows of a batch. Default: those of `example_batch`, 1 without one.
        example_batch: what the model is called with: a mapping, whose entries go to the parameters of `forward`
            by name, or a tensor, or a tuple of tensors. Its tokens are repeated to `max_len`, its masks set to
            ones. Without it, token ids are made for Hugging Face language models and for models whose first
            layer is an embedding.
        loss_fn: called as loss_fn(output, batch), returns a scalar. Default: the output's `loss` where it has
            one, else the mean of its floating-point tensors.
        optimizer: makes a step, so that its state exists during another pass at `max_len`.
        autocast_dtype: run forward and loss under torch.autocast with this dtype.
        scheduler: pass every length that it will visit, too: small tensors come from another pool of the
            allocator, and kernels compile for them here.
        resize_options: for `resize_batch`, as in training: mode, remainder, keys, ...

    Returns:
        AllocatorReport, printable as a short table.

    Raises:
        ValueError: the inputs of the model cannot be guessed, or an argument does not fit.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_int("max_len", max_len, minimum=1)
    if batch_size is not None:
        check_int("batch_size", batch_size, minimum=1)
    if scheduler is not None and scheduler.max_seq_length > max_len:
        raise ValueError(f"max_len must reach the scheduler's max_seq_length {scheduler.max_seq_length}, got {max_len}")
    options = dict(resize_options or {})
    device = _device_of(model)
    started = time.perf_counter()
    meter = _DeviceMemory(device) if device.type == "cuda" else _HostMemory()
    with preserved(model, optimizer), torch.enable_grad():
        if example_batch is None:
            example_batch = guess_batch(model, batch_size or 1, max_len, device)
        longest = stretched(as_mapping(example_batch), batch_size, max_len, options.get("keys"))
        if not model.training:
            model.train()
        train_once = _TrainOnce(model, loss_fn, autocast_dtype, device)
        if optimizer is not None:
            train_once(as_given(longest, example_batch))
            optimizer.step()
        lengths = _lengths(max_len, scheduler)
        for length in tqdm(lengths, desc="warmup_allocator", unit="length", disable=None, leave=False):
            train_once(as_given(resize_batch(longest, length, **options), example_batch))
    rows = next(value.shape[0] for value in longest.values() if isinstance(value, Tensor))
    return AllocatorReport(
        device=str(device),
        batch_size=rows,
        lengths=tuple(lengths),
        **meter.read(),
        seconds=time.perf_counter() - started,
    )


def _device_of(model: nn.Module) -> torch.device:
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _lengths(max_len: int, scheduler: SequenceLengthScheduler | None) -> list[int]:
    """max_len, then what the scheduler visits, from long to short."""
    visited = set() if scheduler is None else {milestone.seq_length for milestone in scheduler.milestones()}
    return [max_len, *sorted(visited - {max_len}, reverse=True)]


@dataclass(frozen=True)
class _TrainOnce:
    """Forward, loss and backward with fresh gradients."""

    model: nn.Module
    loss_fn: LossFunction | None
    autocast_dtype: torch.dtype | None
    device: torch.device

    def __call__(self, batch: ExampleBatch) -> None:
        self.model.zero_grad(set_to_none=True)
        with self._autocast():
            output = call_model(self.model, batch)
            loss = _mean_of_outputs(output) if self.loss_fn is None else self.loss_fn(output, batch)
        if loss.requires_grad:  # a frozen model has nothing to go back to
            loss.backward()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)


def _mean_of_outputs(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not tensors:
        raise ValueError(f"loss_fn is needed: the model returned no floating-point tensor but {type(output).__name__}")
    return torch.stack([tensor.float().mean() for tensor in tensors]).sum()


class _DeviceMemory:
    """The caching allocator's own counters."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.reset_peak_memory_stats(device)
        self.allocations_before = self._allocations()

    def _allocations(self) -> int:
        return torch.cuda.memory_stats(self.device).get("segment.all.allocated", 0)

    def read(self) -> dict[str, Any]:
        torch.cuda.synchronize(self.device)
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(self.device),
            "reserved_bytes": torch.cuda.memory_reserved(self.device),
            "device_allocations": self._allocations() - self.allocations_before,
        }


class _HostMemory:
    """The resident set of this process, the largest since it began."""

    def read(self) -> dict[str, Any]:
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"peak_bytes": peak, "reserved_bytes": None, "device_allocations": None}
