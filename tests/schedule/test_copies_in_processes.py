"""Copies of a schedule in other processes, which the training loop does not step."""

import copy
import multiprocessing
import pickle
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from seqwarm_kernels import SequenceLengthScheduler

from ..support.schedules import BATCH, resize_often


class ResizingCollator:
    """Resizes in a worker, after the preparation of the scheduler there."""

    def __init__(self, scheduler, prepare=None):
        self.scheduler, self.prepare = scheduler, prepare

    def __call__(self, items):
        if self.prepare is not None:
            self.prepare(self)
        return self.scheduler.resize({"input_ids": torch.stack(items)})["input_ids"].shape[1]


def step(collator):
    collator.scheduler.step()


def load(collator):
    collator.scheduler.load_state_dict({**collator.scheduler.state_dict(), "progress": 2})


def assign(collator):
    collator.scheduler.progress = 1


def make(collator):
    collator.scheduler = SequenceLengthScheduler(4, 32, duration=3)


def lengths_in_a_worker(scheduler, prepare=None, context="fork"):
    loader = DataLoader(
        BATCH["input_ids"],
        num_workers=1,
        collate_fn=ResizingCollator(scheduler, prepare),
        multiprocessing_context=context,
    )
    return list(loader)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("copied", [False, True])
def test_a_worker_does_not_resize_to_the_length_of_its_start(copied, context):
    scheduler = SequenceLengthScheduler(8, 32, duration=3)
    scheduler.step()
    scheduler = copy.deepcopy(scheduler) if copied else scheduler
    message = r"Call scheduler.resize\(batch\) in .* scheduler.seq_length_at\(scheduler.progress\) gives the length at"
    with pytest.raises(RuntimeError, match=f"seq_length is not known in a worker .* {message}"):
        lengths_in_a_worker(scheduler, context=context)
    assert scheduler.seq_length == 16


@pytest.mark.parametrize(
    ("prepare", "lengths"), [(step, [16, 24]), (load, [24, 24]), (assign, [16, 16]), (make, [4, 4])]
)
def test_a_worker_with_a_schedule_of_its_own(prepare, lengths):
    assert lengths_in_a_worker(SequenceLengthScheduler(8, 32, duration=3), prepare) == lengths


def test_a_worker_resizes_after_the_warmup():
    scheduler = SequenceLengthScheduler(8, 16, duration=3)
    scheduler.step(3)
    assert lengths_in_a_worker(scheduler) == [16, 16]


def in_a_forked_process(task, *arguments):
    """What a function returns in another process, which is not a worker of a DataLoader."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(task(*arguments)))
    process.start()
    result = receiver.recv()
    process.join()
    return result


def lengths_and_warnings(scheduler, prepare=lambda scheduler: None):
    """The length of the first batch and after 600 batches of a copied or pickled scheduler, and all warnings."""
    scheduler = pickle.loads(scheduler) if isinstance(scheduler, bytes) else scheduler
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = scheduler.resize(BATCH)["input_ids"].shape[1]
        prepare(scheduler)
        resize_often(scheduler, 600)
    return first, scheduler.seq_length, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("copied", [lambda it: it, copy.deepcopy, pickle.dumps], ids=["itself", "copied", "pickled"])
@pytest.mark.parametrize("unit", ["step", "token"])
def test_a_process_with_a_copy_of_a_schedule_that_is_stepped_elsewhere(copied, unit):
    """As those of torchdata's ParallelMapper: the length stays that of their start."""
    scheduler = SequenceLengthScheduler(8, 32, duration=4, unit=unit)
    scheduler.step(1)
    first, last, messages = in_a_forked_process(lengths_and_warnings, copied(scheduler))
    assert (first, last, len(messages)) == (8, 8, 1)
    assert messages[0].startswith(
        "the length is still 8 after 500 batches in a process that has a copy of the scheduler"
    )
    assert messages[0].endswith(
        "Call scheduler.resize(batch) in the process of the training loop, or scheduler.attach(model), or call "
        f"scheduler.step({'' if unit == 'step' else 'number of tokens'}) in this process"
    )


def load_its_state(scheduler):
    scheduler.load_state_dict({**scheduler.state_dict(), "progress": 2})
    scheduler.step()


def assign_progress(scheduler):
    scheduler.progress = 3


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    ("prepare", "last"), [(SequenceLengthScheduler.step, 16), (load_its_state, 24), (assign_progress, 24)]
)
def test_a_process_that_steps_its_copy_of_a_schedule(pickled, prepare, last):
    """As ranks that torch.multiprocessing.spawn starts. They know the length before their first step."""
    scheduler = SequenceLengthScheduler(8, 32, duration=4)
    scheduler.step()
    copied = pickle.dumps(scheduler) if pickled else scheduler
    assert in_a_forked_process(lengths_and_warnings, copied, prepare) == (8, last, [])
    assert in_a_forked_process(lambda: lengths_and_warnings(SequenceLengthScheduler(8, 32, duration=0))[1:]) == (32, [])


def test_a_copy_in_the_same_process_that_was_stepped_does_not_count_again():
    scheduler = SequenceLengthScheduler(8, 32, duration=4)
    scheduler.step()
    for copied in (copy.deepcopy(scheduler), pickle.dumps(scheduler)):
        assert lengths_and_warnings(copied) == (8, 8, [])
