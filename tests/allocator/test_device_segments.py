"""After warmup_allocator no length of a ramp needs memory of the device: training steps of the zoo, on the policy of
PyTorch's caching allocator."""

from types import SimpleNamespace

import pytest
import torch

from bench.allocator.replay import CAPACITY, MIB, CachingAllocator
from seqwarm_kernels import SequenceLengthScheduler, apply_alibi, resize_batch
from seqwarm_kernels.allocator.distributed import RankConsensus
from seqwarm_kernels.allocator.example_batch import TrainingBatches
from seqwarm_kernels.allocator.memory import HostMemory
from seqwarm_kernels.allocator.rehearsal import Warmup
from seqwarm_kernels.allocator.training_pass import TrainingPass

from ..models import zoo
from ..support.recording import STEPS, Playback, Recording, Steps

ROWS, MAX_LEN = 16, 1024
RAMP = [each.seq_length for each in SequenceLengthScheduler(8, MAX_LEN, duration=127, step_size=8).milestones()]
CPU = torch.device("cpu")


def loop_with_variables(model, optimizer, batches):
    """The output and the loss live until the next forward has replaced them."""
    for batch in batches:
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def loop_with_the_loss_only(model, optimizer, batches):
    """As in a trainer, whose function returns the loss: the output is freed before backward."""
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS = [loop_with_variables, loop_with_the_loss_only]


def build(name):
    model = zoo.make(name).train()
    apply_alibi(model, MAX_LEN)
    return model


def longest_batch():
    return {name: torch.randint(3, zoo.VOCABULARY, (ROWS, MAX_LEN)) for name in ("input_ids", "labels")}


def steps_of_training(name, loop):
    def record(length):
        model, recording = build(name), Recording()
        batches = (resize_batch(longest_batch(), length) for _ in recording.boundaries())
        with recording:
            loop(model, torch.optim.AdamW(model.parameters(), foreach=True), batches)
        return recording.steps[:STEPS]

    return Steps(record, (32, 64, 96, 128))


def steps_of_warmup(name):
    def record(length):
        model, recording = build(name), Recording()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        training_pass = TrainingPass(model, CPU, None, None, optimizer, None, None, accumulation_steps=1)
        batches = TrainingBatches(model, longest_batch(), MAX_LEN, CPU, None)
        warm = Warmup(training_pass, batches, HostMemory(), RankConsensus(None, CPU))
        with recording:
            for _ in recording.boundaries():
                assert warm._try_length(ROWS, length, passes=1) is None
        return recording.steps[:STEPS]

    return Steps(record, (32, 64, 96, 128))


class Device:
    """A device with the parameters of a model, on which recorded steps are played."""

    def __init__(self, name):
        self.allocator = CachingAllocator(CAPACITY)
        for parameter in build(name).parameters():
            self.allocator.allocate(parameter.nbytes)
        self.playback = Playback(self.allocator)

    def train(self, steps, lengths):
        """Return the number of segments that the device is asked for."""
        before = self.allocator.device_calls
        for length in lengths:
            self.playback.play(steps, length)
        self.playback.forget()
        return self.allocator.device_calls - before

    def warm_up(self, steps):
        """Run warmup_allocator's passes. Return the segments of its last rehearsal."""
        training_pass = SimpleNamespace(
            optimizer=object(),
            forward_backward=lambda length: self.playback.play(steps, length),
            step=lambda: None,
            forget=self.playback.forget,
        )
        batches = SimpleNamespace(max_len=MAX_LEN, make=lambda rows, length: length)
        consensus = RankConsensus(None, CPU)
        warm = Warmup(training_pass, batches, self, consensus)
        assert warm.choose_batch_size(ROWS, find=False) == (ROWS, None)
        assert warm.rehearse(ROWS, RAMP) is None
        return warm.last_allocations

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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "bloom", "gpt2", "llama"])
def test_no_segment_after_the_warmup(name):
    of_warmup = steps_of_warmup(name)
    for loop in LOOPS:
        steps = steps_of_training(name, loop)
        device, full_length = Device(name), Device(name)
        assert device.warm_up(of_warmup) == 0
        reserved = device.reserved()
        assert device.train(steps, RAMP) == 0
        assert device.train(steps, reversed(RAMP)) == 0
        if loop is loop_with_variables:
            full_length.train(steps, [MAX_LEN] * 4)
            beyond = reserved - full_length.reserved()
            assert beyond <= max(0.05 * full_length.reserved(), 50 * MIB)
