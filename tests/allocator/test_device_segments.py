"""After warmup_allocator no length of a ramp needs memory of the device: training steps of the zoo, on the policy of
PyTorch's caching allocator."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.allocator.replay import CAPACITY, MIB, CachingAllocator
from seqwarm_kernels import SequenceLengthScheduler, apply_alibi, resize_batch
from seqwarm_kernels.allocator.distributed import RankConsensus
from seqwarm_kernels.allocator.example_batch import TrainingBatches
from seqwarm_kernels.allocator.rehearsal import Warmup
from seqwarm_kernels.allocator.training_pass import TrainingPass

from ..models import zoo

ROWS, MAX_LEN = 16, 1024
RAMP = [each.seq_length for each in SequenceLengthScheduler(8, MAX_LEN, duration=15, step_size=8).milestones()]
META = torch.device("meta")


class Device(TorchDispatchMode):
    """Has the parameters of a model. While active, results of operators take memory for as long as they live.

    What an operator allocates and frees inside is not seen.
    """

    def __init__(self, model):
        super().__init__()
        self.allocator, self.living = CachingAllocator(CAPACITY), {}
        for parameter in model.parameters():
            self.hold(parameter.untyped_storage())

    def hold(self, storage):
        key = storage._cdata
        if storage.nbytes() and key not in self.living:
            block = self.allocator.allocate(storage.nbytes())
            self.living[key] = weakref.ref(storage, lambda _: (self.living.pop(key), self.allocator.free(block)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.hold(leaf.untyped_storage())
        return result

    # what warmup_allocator asks of a device

    def allocated(self):
        return self.allocator.in_use

    def peak(self):
        return self.allocator.peak

    def reset_peak(self):
        self.allocator.peak = self.allocator.in_use

    def reserved(self):
        return self.allocator.reserved

    def allocations(self):
        return self.allocator.device_calls

    def free(self):
        return CAPACITY - self.reserved(), CAPACITY

    def reserve_spare(self):
        before, blocks = self.allocations(), []
        while self.allocations() == before:
            blocks.append(self.allocator.allocate(MIB))
        for block in blocks:
            self.allocator.free(block)


def longest_batch():
    return {name: torch.zeros(ROWS, MAX_LEN, dtype=torch.int64, device=META) for name in ("input_ids", "labels")}


def warm_up(model, optimizer, device):
    """Run warmup_allocator's passes. Return the segments of its last rehearsal."""
    training_pass = TrainingPass(model, META, None, None, optimizer, None, None, accumulation_steps=1)
    batches = TrainingBatches(model, longest_batch(), MAX_LEN, META, None)
    warm = Warmup(training_pass, batches, device, RankConsensus(None, META))
    assert warm.choose_batch_size(ROWS, find=False) == (ROWS, None)
    assert warm.rehearse(ROWS, RAMP) is None
    return warm.last_allocations


def loop_with_variables(model, optimizer, lengths):
    """The output and the loss live until the next forward has replaced them."""
    for length in lengths:
        output = model(**resize_batch(longest_batch(), length))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def loop_with_the_loss_only(model, optimizer, lengths):
    """As in a trainer, whose function returns the loss: the output is freed before backward."""
    for length in lengths:
        loss = model(**resize_batch(longest_batch(), length)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def training(name):
    model = zoo.make(name, pad_token_id=None).train().to(META)  # else it looks for padding in the tokens
    apply_alibi(model, MAX_LEN)
    return model, torch.optim.AdamW(model.parameters(), foreach=True), Device(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "bloom", "gpt2", "llama"])
def test_no_segment_after_the_warmup(name):
    model, optimizer, device = training(name)
    with device:
        assert warm_up(model, optimizer, device) == 0
        reserved, allocations = device.reserved(), device.allocations()
        for loop in (loop_with_variables, loop_with_the_loss_only):
            optimizer.state.clear()
            loop(model, optimizer, [*RAMP, MAX_LEN, *reversed(RAMP)])
            assert device.allocations() == allocations, loop
    model, optimizer, full_length = training(name)
    with full_length:
        loop_with_variables(model, optimizer, [MAX_LEN] * 4)
    beyond = reserved - full_length.reserved()
    assert beyond <= max(0.05 * full_length.reserved(), 50 * MIB)
