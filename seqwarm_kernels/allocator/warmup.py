"""Allocate the memory of the longest batch before the first step: `warmup_allocator`."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from tqdm import tqdm

from ..resizing.functional import resize_batch
from ..schedule.attachment import check_resize_options, paused_attachments
from ..schedule.scheduler import SequenceLengthScheduler
from ..utils.caller_warnings import warn_caller
from ..utils.checks import check_bool, check_int, check_module, check_real
from ..utils.modules import ExampleBatch, as_mapping, is_compiled
from .compilation import compilations
from .distributed import Outcome, RankConsensus, check_wrapper, is_sharded, rank_consensus, without_gradient_exchange
from .example_batch import TrainingBatches
from .memory import Memory, fragmentation_advice, is_out_of_memory, memory_of
from .report import AllocatorReport, LengthMemory, OutOfMemory
from .snapshot import check_host_memory, restore_afterwards
from .training_pass import LossFunction, TrainingPass

#: Largest number of rows that batch_size="auto" tries.
_MOST_ROWS = 2**16
#: What batch_size="auto" leaves free, the larger of both.
_LEFT_BYTES, _LEFT_SHARE = 2**30, 0.03
#: Where memory is short, every rehearsal allocates, because blocks are given back to the device in between.
_MOST_REHEARSALS = 5
#: Parameters of `resize_batch` that are no options of a warmup, which passes the batch and takes back the batch alone.
_NOT_RESIZE_OPTIONS = {"batch", "seq_len", "return_info"}


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
    shard_batch: Callable[[Any], Any] | None = None,
    find_batch_size: bool = False,
    raise_out_of_memory: bool = False,
) -> AllocatorReport:
    """Train once at `max_len`, so that memory is allocated and kernels are compiled, then restore everything.

    PyTorch's caching allocator handles growing sequences badly: each new length needs larger blocks than any shorter
    length has left behind. After training passes at the longest length, and with `scheduler` at every other length,
    sequences fit into the reserved blocks.

    The passes are those of this loop::

        for batch in batches:
            output = model(**scheduler.resize(batch))  # the last output lives until here
            loss = loss_fn(output, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    With `scheduler` and the options of the training, this loop and loops that keep less ask the device for no memory
    afterwards, at any of the lengths, in any order, if `last_allocations` of the report is 0. It is not if the device
    is nearly full. Reserved memory is at most 5 % or 50 MiB, whichever is more, beyond what this loop reserves at
    `max_len` alone, and more only with attention that materializes its scores. A loop that frees the output before
    backward would reserve less, by up to two outputs.

    Afterwards parameters, buffers, gradients (None stays None), random streams, train/eval flags, the optimizer, the
    scaler and the scheduler are bit for bit as before, also after an exception. Copies are kept in host memory during
    the call, but not of parameters that are frozen and not in `optimizer`: sums over their bits show that they have not
    changed. Hooks of the model and the optimizer run: a counter in your hook counts these passes, too. A scheduler that
    is attached to the model or a submodule does not resize these passes, and does not count them.

    Under DistributedDataParallel gradients are not exchanged; under fully_shard they are. Every rank must call this
    function. Under DistributedDataParallel all ranks stop if one is out of memory or fails. Under fully_shard ranks
    wait for each other inside a pass. On a GPU the allocators of all ranks get the same limit during the call, the
    room of the fullest device, so that ranks with shards of one size are out of memory at the same allocation. If a
    rank fails alone, the others wait until the timeout of their process group. Then every rank raises an error, or
    NCCL's watchdog ends its process.

    Args:
        model: Any module. It runs in train mode.
        max_len: Longest sequence of the training to come. With a packed `example_batch`, its number of tokens.
        batch_size: Rows of a batch. Default: the rows of `example_batch`, or 1 without one. "auto": the largest number
            of rows that fits and leaves 3 % of the device's memory free, at least 1 GiB.
        example_batch: Input of the model: a mapping, whose entries are passed to the parameters of `forward` by name,
            or a tensor, or a tuple of tensors. Entries without such a parameter are for `loss_fn`. Its tokens are
            repeated to `max_len`, and its masks are set to ones. Without it, inputs are made for Hugging Face models
            from their config, and for models whose first layer is an embedding.
        loss_fn: Called as loss_fn(output, batch), with a batch like `example_batch`, and returns a scalar. Default:
            `loss` of the output if there is one, else the mean of the output's floating-point tensors.
        optimizer: Makes steps, so that its state exists during the passes. Its `step` must not need a closure.
        autocast_dtype: Run forward and loss under torch.autocast with this dtype.
        grad_scaler: Scales the loss, as in training.
        max_grad_norm: Clip gradients by this positive norm before a step, as in training.
        accumulation_steps: Batches whose gradients are accumulated for one step. From the second batch on, gradients
            exist during forward.
        scheduler: Also train at every length of this schedule, shortest first and without the optimizer state of
            earlier passes, until nothing new is allocated, five times at most. Kernels are compiled for these lengths.
        resize_options: Keyword arguments of `resize_batch`, as in training: mode, remainder, keys, ... Not return_info.
        shard_batch: Called with each resized batch, returns the part of it that this rank trains on, as
            `parallel.shard_sequence` does. Lengths of the report are those of whole rows. Ranks then wait for each
            other inside a pass, as under fully_shard.
        find_batch_size: If `batch_size` does not fit, find the largest that does, by bisection.
        raise_out_of_memory: Raise an error if the requested batch size does not fit. By default only the report says
            so.

    Returns:
        AllocatorReport, which prints as a short table.

    Raises:
        TypeError: An argument has the wrong type.
        MemoryError: The copies do not fit into the available host memory.
        RuntimeError: The model has changed a frozen parameter, which is not copied, the driver does not pin two buffers
            of 16 MiB in host memory, or another rank has failed.
        ValueError: The inputs of the model cannot be guessed, an argument has an invalid value, the model is a
            DistributedDataParallel with static_graph=True or DeepSpeed's (call this function before
            `deepspeed.initialize`), or the loss has more than one element, or no graph although parameters require
            gradients.
        torch.OutOfMemoryError: The requested batch size does not fit, and `raise_out_of_memory` is True.
    """
    flags = {"find_batch_size": find_batch_size, "raise_out_of_memory": raise_out_of_memory}
    check_module("model", model)
    check_wrapper(model)
    _check_types(example_batch, loss_fn, shard_batch, optimizer, autocast_dtype, grad_scaler, scheduler, flags)
    max_len = check_int("max_len", max_len, minimum=1)
    batch_size = _check_batch_size(batch_size)
    max_grad_norm = _check_max_grad_norm(max_grad_norm)
    accumulation_steps = check_int("accumulation_steps", accumulation_steps, minimum=1)
    _check_resize_options(resize_options)
    if scheduler is not None and scheduler.max_seq_length > max_len:
        raise ValueError(f"max_len must reach the scheduler's max_seq_length {scheduler.max_seq_length}, got {max_len}")
    _warn_of_foreign_optimizer(model, optimizer)
    are_waiting = shard_batch is not None or is_sharded(model)  # ranks, for each other
    started = time.perf_counter()
    device = _device_of(model)
    memory = memory_of(device)
    allocations_before = memory.allocations()
    if batch_size == "auto" and allocations_before is None:
        raise ValueError(f"batch_size='auto' needs a device that reports when it is out of memory, got {device}")
    with (
        compilations() as compiled,
        rank_consensus(model, device, are_waiting=are_waiting) as consensus,
        _limited(memory, consensus, are_waiting, batch_size == "auto"),
        _restored(consensus, model, optimizer, grad_scaler),
        without_gradient_exchange(model),
        paused_attachments(model),
        torch.enable_grad(),
    ):
        if not model.training:
            model.train()
        lengths = _lengths(max_len, scheduler, model)
        warmup = _Warmup(
            TrainingPass(
                model=model,
                device=device,
                loss_fn=loss_fn,
                autocast_dtype=autocast_dtype,
                optimizer=optimizer,
                grad_scaler=grad_scaler,
                max_grad_norm=max_grad_norm,
                accumulation_steps=accumulation_steps,
            ),
            TrainingBatches(model, example_batch, max_len, device, resize_options, shard_batch),
            memory,
            consensus,
        )
        rows, problem = warmup.choose_batch_size(batch_size, find_batch_size)
        entries: tuple[LengthMemory, ...] = ()
        if rows > 0 and (problem is None or batch_size == "auto"):
            problem = warmup.rehearse(rows, lengths)
            entries = tuple(warmup.measured.values())
    memory.synchronize()
    allocations = memory.allocations()
    report = AllocatorReport(
        device=str(device),
        batch_size=rows,
        lengths=tuple(entry.length for entry in entries),
        seconds=time.perf_counter() - started,
        peak_bytes=max([memory.peak(), *(entry.peak_bytes for entry in entries)]),
        reserved_bytes=memory.reserved(),
        device_allocations=None if allocations is None else allocations - (allocations_before or 0),
        last_allocations=warmup.last_allocations,
        compiled=tuple(compiled),
        memory=entries,
        out_of_memory=problem,
    )
    if problem is not None and raise_out_of_memory:
        raise torch.OutOfMemoryError(f"warmup_allocator: {problem}")
    return report


def _check_types(
    example_batch: ExampleBatch | None,
    loss_fn: object,
    shard_batch: object,
    optimizer: object,
    autocast_dtype: object,
    grad_scaler: object,
    scheduler: object,
    flags: Mapping[str, object],
) -> None:
    if example_batch is not None:
        as_mapping(example_batch)
    for name, function in (("loss_fn", loss_fn), ("shard_batch", shard_batch)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable or None, got {type(function).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer or None, got {type(optimizer).__name__}")
    _check_step(optimizer)
    if autocast_dtype is not None and not isinstance(autocast_dtype, torch.dtype):
        raise TypeError(f"autocast_dtype must be a torch.dtype or None, got {type(autocast_dtype).__name__}")
    if isinstance(autocast_dtype, torch.dtype) and not autocast_dtype.is_floating_point:
        raise ValueError(f"autocast_dtype must be a floating-point dtype, got {autocast_dtype}")
    if grad_scaler is not None and not isinstance(grad_scaler, GradScaler):
        raise TypeError(f"grad_scaler must be a torch.amp.GradScaler or None, got {type(grad_scaler).__name__}")
    if scheduler is not None and not isinstance(scheduler, SequenceLengthScheduler):
        raise TypeError(f"scheduler must be a SequenceLengthScheduler or None, got {type(scheduler).__name__}")
    for name, flag in flags.items():
        check_bool(name, flag)


def _check_step(optimizer: Optimizer | None) -> None:
    """The passes call `optimizer.step()`. Optimizers such as LBFGS need a closure that computes the loss."""
    closure = None if optimizer is None else inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"optimizer must have a step without a closure, got {type(optimizer).__name__}, which needs one: leave "
            "optimizer out, then the memory of its state is not allocated"
        )


def _warn_of_foreign_optimizer(model: nn.Module, optimizer: Optimizer | None) -> None:
    """A warning only: the optimizer may hold copies of the model's parameters."""
    if optimizer is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(map(id, model.parameters())):
        warn_caller("optimizer holds no parameter of model: the memory of its state may not be allocated")


def _check_batch_size(batch_size: Any) -> int | Literal["auto"] | None:
    if batch_size is None or (isinstance(batch_size, str) and batch_size == "auto"):
        return batch_size  # type: ignore[return-value]
    if isinstance(batch_size, str):
        raise ValueError(f"batch_size must be an int or 'auto', got {batch_size!r}")
    return check_int("batch_size", batch_size, minimum=1)


def _check_max_grad_norm(max_grad_norm: object) -> float | None:
    if max_grad_norm is None:
        return None
    norm = check_real("max_grad_norm", max_grad_norm)
    if norm <= 0:
        raise ValueError(f"max_grad_norm must be positive, got {norm}")
    return norm


def _check_resize_options(resize_options: object) -> None:
    if resize_options is None:
        return
    if not isinstance(resize_options, Mapping):
        raise TypeError(f"resize_options must be a mapping or None, got {type(resize_options).__name__}")
    known = set(inspect.signature(resize_batch).parameters) - _NOT_RESIZE_OPTIONS
    unknown = [name for name in resize_options if name not in known]
    if unknown:
        raise ValueError(f"resize_options must hold options of resize_batch, {sorted(known)}, got {unknown}")
    check_resize_options(resize_options)


def _device_of(model: nn.Module) -> torch.device:
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _lengths(max_len: int, scheduler: SequenceLengthScheduler | None, model: nn.Module) -> list[int]:
    """Return the lengths to rehearse, from short to long: max_len and those of the schedule, or none without one."""
    if scheduler is not None:
        return sorted({max_len, *(milestone.seq_length for milestone in scheduler.milestones())})
    if max_len > 3 and is_compiled(model):
        return [max_len // 2, max_len]  # torch.compile makes the length dynamic at the second length
    return []


def _limited(memory: Memory, consensus: RankConsensus, are_waiting: bool, auto: bool) -> AbstractContextManager[None]:
    """Return the context of a limit of memory, if it is needed.

    Ranks that wait for each other are out of memory at the same allocation, so that none is left in a collective.
    A batch size that is found leaves memory to communication, kernels that are loaded later, and other libraries.
    """
    reserved = memory.reserved()
    if reserved is None or not (are_waiting or auto):
        return nullcontext()
    if are_waiting:
        memory.release()  # unused memory in pieces differs between ranks
        reserved = memory.reserved() or 0
    allocated, (free, total) = memory.allocated(), memory.free()
    room = free + reserved - allocated - (max(_LEFT_BYTES, int(_LEFT_SHARE * total)) if auto else 0)
    return memory.limited_to(allocated + (consensus.smallest(room) if are_waiting else room))


@contextmanager
def _restored(
    consensus: RankConsensus, model: nn.Module, optimizer: Optimizer | None, grad_scaler: GradScaler | None
) -> Iterator[None]:
    """Restore everything afterwards. If one rank cannot copy its tensors, every rank raises."""
    with ExitStack() as stack:
        failure = None
        try:
            check_host_memory(model, optimizer, grad_scaler)
            stack.enter_context(restore_afterwards(model, optimizer, grad_scaler))
        except Exception as error:
            failure = error
        if consensus.largest(int(failure is not None)):
            raise failure or RuntimeError("warmup_allocator: another rank could not copy its tensors to host memory")
        yield


@dataclass
class _Warmup:
    """The training passes of one call of `warmup_allocator`."""

    training_pass: TrainingPass
    batches: TrainingBatches
    memory: Memory
    consensus: RankConsensus
    measured: dict[int, LengthMemory] = field(default_factory=dict)  #: by length, of the last batch size that fits
    last_allocations: int | None = None  #: of the last rehearsal

    def choose_batch_size(self, batch_size: int | Literal["auto"] | None, find: bool) -> tuple[int, OutOfMemory | None]:
        """Return the rows to continue with, and a description if the requested rows do not fit."""
        if batch_size == "auto":
            return self._largest_batch_size()
        rows = self.consensus.largest(batch_size or self.batches.example_rows())
        problem = self._try_rows(rows)
        if problem is None or not find:
            return rows, problem
        return rows, replace(problem, largest_batch_size=self._bisect(0, rows))

    def rehearse(self, rows: int, lengths: list[int]) -> OutOfMemory | None:
        """Train at each length as training will, until that allocates nothing. Return the first that does not fit."""
        if not self.measured:  # the last attempt of a search did not fit, and its memory was released
            problem = self._try_rows(rows)
            if problem is not None:
                return problem
        for _ in range(_MOST_REHEARSALS if lengths else 0):
            before = self.memory.allocations()
            self.training_pass.forget()
            for length in tqdm(lengths, desc="warmup_allocator", unit="length", disable=None, leave=False):
                problem = self._try_length(rows, length, passes=1)
                if problem is not None:
                    return problem
            after = self.memory.allocations()
            self.last_allocations = None if before is None or after is None else after - before
            if self.consensus.largest(self.last_allocations or 0) == 0:
                break
        self.training_pass.forget()
        # Loops differ in the small tensors that they keep: batches, losses, metrics.
        return self._attempt(self.memory.reserve_spare, rows, self.batches.max_len) if lengths else None

    def _largest_batch_size(self) -> tuple[int, OutOfMemory | None]:
        fits, rows = 0, 1
        while rows <= _MOST_ROWS:
            problem = self._try_rows(rows)
            if problem is not None:
                fits = self._bisect(fits, rows)
                return fits, replace(problem, largest_batch_size=fits)
            fits, rows = rows, 2 * rows
        return fits, None

    def _bisect(self, fits: int, too_large: int) -> int:
        while too_large - fits > 1:
            rows = (fits + too_large) // 2
            if self._try_rows(rows) is None:
                fits = rows
            else:
                too_large = rows
        return fits

    def _try_rows(self, rows: int) -> OutOfMemory | None:
        """Train at max_len: once without optimizer state, and once with it."""
        self.measured.clear()
        return self._try_length(rows, self.batches.max_len, passes=1 if self.training_pass.optimizer is None else 2)

    def _try_length(self, rows: int, length: int, passes: int) -> OutOfMemory | None:
        def work() -> None:
            for _ in range(passes):
                self.training_pass.forward_backward(self.batches.make(rows, length))
                self.training_pass.step()

        problem = self._attempt(work, rows, length)
        if problem is None:
            self.measured[length] = LengthMemory(length, self.memory.peak(), self.memory.reserved())
        return problem

    def _attempt(self, work: Callable[[], None], rows: int, length: int) -> OutOfMemory | None:
        """Return a description if any rank is out of memory. Any other error is raised, on every rank."""
        self.memory.reset_peak()
        before = self.memory.allocated(), *self.memory.free()
        own, problem, failure = Outcome.FITS, None, None
        try:
            work()
        except Exception as error:
            if is_out_of_memory(error):
                own = Outcome.OUT_OF_MEMORY
                message = str(error).partition("\n")[0]
                problem = OutOfMemory(rows, length, message, *before, None, fragmentation_advice(self.memory))
            else:
                own, failure = Outcome.FAILED, error
        worst = self.consensus.worst_outcome(own)
        if failure is not None:
            raise failure
        if worst == Outcome.FAILED:
            own_problem = "" if problem is None else f"; here {problem}"
            raise RuntimeError(f"warmup_allocator failed on another rank{own_problem}")
        if worst == Outcome.FITS:
            return None
        self.training_pass.discard()
        gc.collect()
        self.memory.release()
        return problem or OutOfMemory(rows, length, "another rank is out of memory", *before, None, None)
