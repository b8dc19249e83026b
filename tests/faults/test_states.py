"""States that are damaged, or of another version, work or are refused. An object that refuses a state is unchanged."""

import copy
import json
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.data import (
    BatchPlanner,
    LengthBatchSampler,
    LengthBatchStream,
    PaddedCollator,
    ResumableLoader,
    SequenceSource,
)
from seqwarm_kernels.diagnostics import TrainingMonitor
from seqwarm_kernels.trainers.schedule_state import ScheduleState

from .mutations import EXAMPLES, changed, explore

ITEMS = [[number] * (1 + number % 50) for number in range(300)]
LENGTHS = [len(item) for item in ITEMS]


def scheduler():
    return SequenceLengthScheduler(8, 64, duration=100)


def scheduler_on_the_way():
    made = scheduler()
    made.step(30)
    return made


def sampler():
    return LengthBatchSampler(LENGTHS, BatchPlanner(200), window=100)


def stream(source=None):
    source = SequenceSource(ITEMS) if source is None else source
    return LengthBatchStream(source, BatchPlanner(200), length=len, window=100)


def loader():
    return ResumableLoader(DataLoader(ITEMS, batch_sampler=sampler(), collate_fn=PaddedCollator()))


def monitor():
    parameter = torch.nn.Parameter(torch.ones(2))
    made = TrainingMonitor(torch.optim.Adam([parameter]), read_every=1)
    parameter.sum().backward()
    made._optimizer.step()
    made.observe(1.0)
    return made


BATCHES = {"LengthBatchSampler": sampler, "LengthBatchStream": stream, "ResumableLoader": loader}
NOT_STATES = [None, 0, 2**70, "junk", [], {}, [[0, 0]], {"junk": 1}, b"junk"]
OTHERS = {
    "SequenceLengthScheduler": scheduler_on_the_way,
    "TrainingMonitor": monitor,
}


def assert_works_or_refuses(target, state):
    before = copy.deepcopy(target.state_dict())
    try:
        target.load_state_dict(state)
    except (TypeError, ValueError):
        assert target.state_dict() == before
    json.dumps(target.state_dict())


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("examples", EXAMPLES)
def test_counts(make, examples):
    target = make()
    explore(examples, changed(target.state_dict()), partial(assert_works_or_refuses, target))


@pytest.mark.parametrize("make", [*OTHERS.values(), *BATCHES.values()], ids=[*OTHERS, *BATCHES])
def test_what_is_not_a_state(make):
    target = make()
    before = target.state_dict()
    for junk in NOT_STATES:
        with pytest.raises((KeyError, TypeError, ValueError)):
            target.load_state_dict(junk)
    assert target.state_dict() == before


@pytest.mark.parametrize("examples", EXAMPLES)
def test_states_in_checkpoints_of_trainers(examples):
    warmup = ScheduleState(scheduler())
    before = warmup.state_dict()

    def check(state):
        try:
            warmup._resume(state)
        except (KeyError, TypeError, ValueError):
            assert warmup.state_dict() == before
        warmup._resume(before)

    explore(examples, changed(before), check)
