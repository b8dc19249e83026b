"""Memory: own the worst case before the first step."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from tqdm.auto import tqdm

from ..resizing.functional import resize_batch
from ..schedule.scheduler import SequenceLengthScheduler
from ..utils.checks import check_int, check_real
from ..utils.modules import ExampleBatch, as_given, as_mapping, guess_batch, is_compiled
from . import memory as memory_meters
from .compilation import compilations
from .distributed import Agreement, Outcome, end_iteration, reshard, without_traces
from .example_batch import layout_of, sequence_names, stretched
from .memory import Memory
from .report import AllocatorReport, LengthMemory, OutOfMemory
from .snapshot import preserved
from .training_pass import LossFunction, TrainingPass

#: Rows that batch_size="auto" stops at, if memory has not ended before.
MOST_ROWS = 2**16


def warmup_allocator(
    model: nn.Module,
    max_len: int,
    *,
    batch_size: int | Literal["auto"] | None = None,
    example_batch: ExampleBatch | None = None,
    loss_fn: LossFunction | None = None,
    optimizer: Optimizer | None = None,
    autocast_dtype: torch.dtype | None = None,
    grad_scaler: GradScaler | None = None,
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
    scheduler: SequenceLengthScheduler | None = None,
    resize_options: Mapping[str, Any] | None = None,
    find_batch_size: bool = False,
    raise_out_of_memory: bool = False,
) -> AllocatorReport:
    """Train once at `max_len`, so that memory is claimed and kernels are compiled; then put everything back.

    PyTorch's caching allocator serves growing sequences badly: each new length asks the device for blocks that
    no earlier one left behind. After the longest length has passed, shorter ones fit into what is there.

    Afterwards parameters, buffers, gradients (None stays None), random streams, train/eval flags, the optimizer, the
    scaler and the scheduler are bit for bit as before, also after an exception. Copies of them are held in host
    memory meanwhile. Hooks of the model and the optimizer fire: a counter of yours in one of them counts these passes.

    Under DistributedDataParallel gradients are not exchanged; under fully_shard they are. Every rank must call this;
    if one is out of memory, or fails, all of them stop.

    Args:
        model: any module; put into train mode if it is in eval mode.
        max_len: the longest sequence of the training to come.
        batch_size: rows of a batch. Default: those of `example_batch`, 1 without one. "auto": the most that fit.
        example_batch: what the model is called with: a mapping, whose entries go to the parameters of `forward`
            by name, or a tensor, or a tuple of tensors. Its tokens are repeated to `max_len`, its masks set to
            ones. Without it, inputs are made for Hugging Face models from their config, and for models whose first
            layer is an embedding.
        loss_fn: called as loss_fn(output, batch), returns a scalar. Default: the output's `loss` where it has
            one, else the mean of its floating-point tensors.
        optimizer: makes steps, so that its state exists during the passes.
        autocast_dtype: run forward and loss under torch.autocast with this dtype.
        grad_scaler: scales the loss, as in training.
        max_grad_norm: clip gradients by this norm before a step, as in training.
        accumulation_steps: batches whose gradients add up to one step: from the second on, gradients are there
            during forward.
        scheduler: pass every length that it will visit, too: small tensors come from another pool of the
            allocator, and kernels compile for them here.
        resize_options: for `resize_batch`, as in training: mode, remainder, keys, ...
        find_batch_size: where `batch_size` does not fit, find the largest that does, by bisection.
        raise_out_of_memory: raise where the batch size asked for does not fit; by default the report says so.

    Returns:
        AllocatorReport, printable as a short table.

    Raises:
        ValueError: the inputs of the model cannot be guessed, or an argument does not fit.
        torch.OutOfMemoryError: with `raise_out_of_memory`, with the report's words.
    """
    _check_arguments(model, max_len, batch_size, max_grad_norm, accumulation_steps, scheduler)
    started = time.perf_counter()
    device = _device_of(model)
    memory = memory_meters.memory_of(device)
    if batch_size == "auto" and memory.allocations() is None:
        raise ValueError(f"batch_size='auto' needs a device that says when it is out of memory, got {device}")
    allocations_before = memory.allocations()
    options = dict(resize_options or {})
    reshard(model)  # a forward without a backward does not
    with (
        compilations() as compiled,
        preserved(model, optimizer, grad_scaler),
        without_traces(model),
        torch.enable_grad(),
    ):
        if not model.training:
            model.train()
        example = example_batch
        if example is None:
            example = guess_batch(model, 1, max_len, device)
            options.setdefault("keys", sequence_names(example, max_len))
        warmup = _Warmup(
            TrainingPass(
                model, device, loss_fn, autocast_dtype, optimizer, grad_scaler, max_grad_norm, accumulation_steps
            ),
            memory,
            Agreement(model, device),
            example,
            max_len,
            options,
        )
        rows, problem = warmup.settle_rows(batch_size, find_batch_size)
        passed: list[LengthMemory] = []
        if rows > 0 and (problem is None or batch_size == "auto"):
            passed, problem = warmup.pass_lengths(rows, _lengths(max_len, scheduler, is_compiled(model)))
    memory.synchronize()
    allocations = memory.allocations()
    report = AllocatorReport(
        device=str(device),
        batch_size=rows,
        lengths=tuple(entry.length for entry in passed),
        seconds=time.perf_counter() - started,
        peak_bytes=max([memory.peak(), *(entry.peak_bytes for entry in passed)]),
        reserved_bytes=memory.reserved(),
        device_allocations=None if allocations is None else allocations - (allocations_before or 0),
        compiled=tuple(compiled),
        memory=tuple(passed),
        out_of_memory=problem,
    )
    if problem is not None and raise_out_of_memory:
        raise torch.OutOfMemoryError(f"warmup_allocator: {problem}")
    return report


def _check_arguments(
    model: object,
    max_len: object,
    batch_size: object,
    max_grad_norm: object,
    accumulation_steps: object,
    scheduler: SequenceLengthScheduler | None,
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_int("max_len", max_len, minimum=1)
    if isinstance(batch_size, str) and batch_size != "auto":
        raise ValueError(f"batch_size must be a number or 'auto', got {batch_size!r}")
    if batch_size is not None and batch_size != "auto":
        check_int("batch_size", batch_size, minimum=1)
    if max_grad_norm is not None:
        check_real("max_grad_norm", max_grad_norm)
    check_int("accumulation_steps", accumulation_steps, minimum=1)
    if scheduler is not None and scheduler.max_seq_length > max_len:  # type: ignore[operator]
        raise ValueError(f"max_len must reach the scheduler's max_seq_length {scheduler.max_seq_length}, got {max_len}")


def _device_of(model: nn.Module) -> torch.device:
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _lengths(max_len: int, scheduler: SequenceLengthScheduler | None, compiled: bool) -> list[int]:
    """max_len, then what the scheduler visits, from long to short; a compiled model sees two at least, after which
    torch.compile takes lengths for dynamic."""
    visited = set() if scheduler is None else {milestone.seq_length for milestone in scheduler.milestones()}
    visited -= {max_len}
    if compiled and not visited and max_len > 3:
        visited = {max_len // 2}
    return [max_len, *sorted(visited, reverse=True)]


@dataclass
class _Warmup:
    """The passes of one call."""

    training_pass: TrainingPass
    memory: Memory
    agreement: Agreement
    example: ExampleBatch
    max_len: int
    resize_options: dict[str, Any]
    full_length: dict[int, LengthMemory] = field(default_factory=dict)  #: by rows: the last attempt, if it fits

    def settle_rows(self, batch_size: int | Literal["auto"] | None, find: bool) -> tuple[int, OutOfMemory | None]:
        """The rows to go on with, and, where those asked for do not fit, what to say of it."""
        if batch_size == "auto":
            return self._most_rows()
        rows = batch_size or layout_of(as_mapping(self.example), self.resize_options).batch_size
        rows = self.agreement.largest(rows)
        problem = self._try_rows(rows)
        if problem is None or not find:
            return rows, problem
        return rows, replace(problem, largest_batch_size=self._bisect(0, rows))

    def _most_rows(self) -> tuple[int, OutOfMemory | None]:
        fitting, rows = 0, 1
        while rows <= MOST_ROWS:
            problem = self._try_rows(rows)
            if problem is not None:
                fitting = self._bisect(fitting, rows)
                return fitting, replace(problem, largest_batch_size=fitting)
            fitting, rows = rows, 2 * rows
        return fitting, None

    def _bisect(self, fits: int, does_not: int) -> int:
        while does_not - fits > 1:
            rows = (fits + does_not) // 2
            if self._try_rows(rows) is None:
                fits = rows
            else:
                does_not = rows
        return fits

    def _try_rows(self, rows: int) -> OutOfMemory | None:
        """Train at max_len: with new optimizer state, and with state that is there."""

        def work() -> None:
            batch = self._batch(rows, self.max_len)
            for _ in range(1 if self.training_pass.optimizer is None else 2):
                self.training_pass.differentiate(batch)
                self.training_pass.step()

        self.full_length.clear()
        problem = self._attempt(work, rows, self.max_len)
        if problem is None:
            self.full_length[rows] = self._measured(self.max_len)
        return problem

    def pass_lengths(self, rows: int, lengths: list[int]) -> tuple[list[LengthMemory], OutOfMemory | None]:
        """Those that passed, and why no more did."""
        passed: list[LengthMemory] = []
        for length in tqdm(lengths, desc="warmup_allocator", unit="length", disable=None, leave=False):
            if length == self.max_len and rows in self.full_length:
                passed.append(self.full_length[rows])
                continue

            def work(length: int = length) -> None:
                self.training_pass.differentiate(self._batch(rows, length))

            problem = self._attempt(work, rows, length)
            if problem is not None:
                return passed, problem
            passed.append(self._measured(length))
        return passed, None

    def _measured(self, length: int) -> LengthMemory:
        return LengthMemory(length, self.memory.peak(), self.memory.reserved())

    def _batch(self, rows: int, length: int) -> ExampleBatch:
        """As training has it: so many rows of max_len on the model's device, resized."""
        device = self.training_pass.device
        longest = stretched(as_mapping(self.example), rows, self.max_len, self.resize_options)
        there = {name: entry.to(device) if isinstance(entry, Tensor) else entry for name, entry in longest.items()}
        return as_given(resize_batch(there, length, **self.resize_options), self.example)

    def _attempt(self, work: Callable[[], None], rows: int, length: int) -> OutOfMemory | None:
        """Any other error than being out of memory is raised, on every rank."""
        self.memory.reset_peak()
        before = self.memory.allocated(), *self.memory.free()
        own, problem, failure = Outcome.FITS, None, None
        try:
            work()
        except Exception as error:
            if _is_out_of_memory(error):
                own = Outcome.OUT_OF_MEMORY
                message = str(error).partition("\n")[0]
                problem = OutOfMemory(rows, length, message, *before, None, _advice(self.memory))
            else:
                own, failure = Outcome.FAILED, error
        worst = self.agreement.worst(own)
        if failure is not None:
            raise failure
        if worst == Outcome.FAILED:
            raise RuntimeError("warmup_allocator failed on another rank")
        if worst == Outcome.FITS:
            return None
        self.clean()
        return problem or OutOfMemory(rows, length, "another rank is out of memory", *before, None, None)

    def clean(self) -> None:
        """Give up what a pass that did not fit has left."""
        end_iteration(self.training_pass.model)
        self.training_pass.model.zero_grad(set_to_none=True)
        gc.collect()
        self.memory.release()


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _advice(memory: Memory) -> str | None:
    """Where much of what the allocator owns lies in pieces that nothing fits into."""
    reserved = memory.reserved()
    if reserved is None:
        return None
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    unused, total = reserved - memory.allocated(), memory.free()[1]
    if "expandable_segments:True" in settings or unused < total / 10:
        return None
    return (
        f"{unused / 2**20:,.0f} MiB that the allocator owns lie in pieces too small for what was asked: "
        "PYTORCH_ALLOC_CONF=expandable_segments:True lets it join them"
    )
