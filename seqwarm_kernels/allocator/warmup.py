"""Allocate the memory of the longest batch before the first step: `warmup_allocator`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..resizing.options import KEEPING_SHAPE
from ..schedule.attachment import paused_attachments
from ..schedule.scheduler import SequenceLengthScheduler
from ..utils.checks import check_int
from ..utils.modules import ExampleBatch, is_compiled
from .compilation import compilations
from .distributed import RankConsensus, check_wrapper, is_sharded, rank_consensus, reshard, without_gradient_exchange
from .example_batch import TrainingBatches
from .memory import Memory, memory_of
from .rehearsal import Warmup
from .report import AllocatorReport, LengthMemory
from .snapshot import restored
from .training_pass import LossFunction, TrainingPass

#: What batch_size="auto" leaves free, the larger of both.
_LEFT_BYTES, _LEFT_SHARE = 2**30, 0.03


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
    """Train once at `max_len`, so that memory is allocated and kernels are compiled, then restore the state.

    PyTorch's caching allocator handles growing sequences badly: each new length needs larger blocks than any shorter
    length has left behind. After training passes at the longest length, and with `scheduler` at every other length,
    sequences fit into the reserved blocks.

    The passes are those of this loop::

        for batch in batches:
            batch = scheduler.resize(batch)
            output = model(**batch)  # the last output lives until here
            loss = loss_fn(output, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    With `scheduler` and the options of the training, this loop and loops that keep less ask the device for no memory
    afterwards, at any of the lengths, in any order, if `last_allocations` of the report is 0. It is not if the device
    is nearly full. Reserved memory is at most 5 % or 50 MiB, whichever is more, beyond what this loop reserves at
    `max_len` alone, and more only with attention that materializes its scores. A loop that frees the output before
    backward would reserve less, by up to two outputs.

    Afterwards these are bit for bit as before, also after an exception: parameters, buffers and attributes of modules,
    their train/eval and requires_grad flags, gradients (None stays None), the optimizer, the scaler, and the random
    states of torch, NumPy and Python. Copies are kept in host memory during the call. Not restored are values deep
    inside of containers, other objects that are attributes, sparse tensors, attributes of torch's wrappers, and what
    hooks and `loss_fn` change elsewhere. A scheduler that is attached to the model or a submodule does not resize
    these passes, and does not count them.

    Under DistributedDataParallel gradients are not exchanged; under fully_shard they are. Every rank must call this
    function. Under DistributedDataParallel all ranks stop if one is out of memory or fails. Under fully_shard ranks
    wait for each other inside a pass. On a GPU the allocators of all ranks get the same limit during the call, the
    room of the fullest device, so that ranks with shards of one size are out of memory at the same allocation. If a
    rank fails alone, the others wait until the timeout of their process group. Then every rank raises an error, or
    NCCL's watchdog ends its process.

    Args:
        model: Any module. It runs in train mode.
        max_len: Longest sequence of the training to come. With a packed `example_batch`, its number of tokens, which
            should be the most that a batch of the training has.
        batch_size: Rows of a batch. Default: the rows of `example_batch`, or 1 without one. "auto": the largest number
            of rows that fits and leaves 3 % of the device's memory free, at least 1 GiB.
        example_batch: Input of the model: a mapping, whose entries are passed to the parameters of `forward` by name,
            or a tensor, or a tuple of tensors. Entries without such a parameter are for `loss_fn`. Its rows, of two
            tokens or more, are repeated to `max_len`, its position ids count anew unless they restart in a row, and
            its masks are set to ones. Without it, inputs are made for Hugging Face models from their config, and for
            models whose first layer is an embedding.
        loss_fn: Called as loss_fn(output, batch), with a batch like `example_batch`, and returns a scalar. Default:
            `loss` of the output if there is one, else the mean of the output's floating-point tensors.
        optimizer: Makes steps, so that its state exists during the passes. Its `step` must not need a closure.
        autocast_dtype: Run forward and loss under torch.autocast with this dtype.
        grad_scaler: Scales the loss, as in training.
        max_grad_norm: Clip gradients by this norm before a step, as in training.
        accumulation_steps: Batches whose gradients are accumulated for one step. From the second batch on, gradients
            exist during forward.
        scheduler: Also train at every length of this schedule, shortest first and without the optimizer state of
            earlier passes, until nothing new is allocated, five times at most. Kernels are compiled for these lengths.
        resize_options: Keyword arguments of `resize_batch`, as in training: mode, remainder, keys, ... With "segments"
            all lengths have one shape, so one pass stands for all of `scheduler`: two where the model gets a number, as
            of "window" and `segment_length`.
        shard_batch: Called with each resized batch, returns the part of it that this rank trains on, as
            `parallel.shard_sequence` does. Lengths of the report are those of whole rows. Ranks then wait for each
            other inside a pass, as under fully_shard.
        find_batch_size: If `batch_size` does not fit, find the largest that does, by bisection.
        raise_out_of_memory: Raise an error if the requested batch size does not fit. By default only the report says
            so.

    Returns:
        AllocatorReport, which prints as a short table.

    Raises:
        MemoryError: The copies do not fit into the available host memory.
        RuntimeError: Another rank has failed.
        ValueError: The inputs of the model cannot be guessed, an argument has an invalid value, `optimizer` holds no
            parameter of `model`, or the model is a DistributedDataParallel with static_graph=True or DeepSpeed's (call
            this function before `deepspeed.initialize`).
        torch.OutOfMemoryError: The requested batch size does not fit, and `raise_out_of_memory` is True.
    """
    check_wrapper(model)
    max_len = check_int("max_len", max_len, minimum=1)
    accumulation_steps = check_int("accumulation_steps", accumulation_steps, minimum=1)
    if batch_size is not None and batch_size != "auto":
        batch_size = check_int("batch_size", batch_size, minimum=1)
    if scheduler is not None and scheduler.max_seq_length > max_len:
        raise ValueError(f"max_len must reach the scheduler's max_seq_length {scheduler.max_seq_length}, got {max_len}")
    reshard(model)  # parameters stay unsharded after a forward without a backward
    if optimizer is not None and _parameters_of(optimizer).isdisjoint(model.parameters()):
        raise ValueError("optimizer must hold parameters of model, got one that holds none of them")
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
        _restored_on_all_ranks(consensus, model, optimizer, grad_scaler),
        without_gradient_exchange(model),
        paused_attachments(model),
        torch.enable_grad(),
    ):
        if not model.training:
            model.train()
        if scheduler is not None and (resize_options or {}).get("mode") == "segments":
            resize_options = {"lengths": (scheduler.min_seq_length, scheduler.max_seq_length), **(resize_options or {})}
        batches = TrainingBatches(model, example_batch, max_len, device, resize_options, shard_batch)
        lengths = _lengths(max_len, scheduler, model, batches.resize_options)
        warmup = Warmup(
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
            batches,
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


def _device_of(model: nn.Module) -> torch.device:
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _parameters_of(optimizer: Optimizer) -> set[Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _lengths(
    max_len: int, scheduler: SequenceLengthScheduler | None, model: nn.Module, resize_options: Mapping[str, Any]
) -> list[int]:
    """Return the lengths to rehearse, from short to long: max_len and those of the schedule, or none without one.

    Where batches keep their shape, one stands for all. A length that the model gets as a number, by which compiled
    code and kernels may choose, needs the shortest, too.
    """
    if resize_options.get("mode") in KEEPING_SHAPE and (scheduler is not None or is_compiled(model)):
        is_number = resize_options["mode"] == "window" or resize_options["boundaries"] == "segment_length"
        shortest = max_len // 2 or 1 if scheduler is None else scheduler.min_seq_length
        return sorted({shortest, max_len}) if is_number else [max_len]
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
def _restored_on_all_ranks(
    consensus: RankConsensus, model: nn.Module, optimizer: Optimizer | None, grad_scaler: GradScaler | None
) -> Iterator[None]:
    """Restore everything afterwards. If one rank cannot copy its tensors, every rank raises."""
    with ExitStack() as stack:
        failure = None
        try:
            stack.enter_context(restored(model, optimizer, grad_scaler))
        except Exception as error:
            failure = error
        if consensus.largest(int(failure is not None)):
            raise failure or RuntimeError("warmup_allocator: another rank could not copy its tensors to host memory")
        yield
