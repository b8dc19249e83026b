"""States that are damaged, or of another version, work or are refused. An object that refuses a state is unchanged."""

import contextlib
import copy
import itertools
import json
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from seqwarm_kernels import SequenceLengthScheduler, TokenLR
from seqwarm_kernels.data import (
    BatchPlanner,
    ChunkSource,
    LengthBatchSampler,
    LengthBatchStream,
    PaddedCollator,
    ResumableLoader,
    SequenceSource,
    StreamSource,
    write_chunks,
)
from seqwarm_kernels.diagnostics import TrainingMonitor
from seqwarm_kernels.trainers.schedule_state import ScheduleState

from ..data.made import Stream
from .mutations import EXAMPLES, changed, explore

ITEMS = [[number] * (1 + number % 50) for number in range(300)]
LENGTHS = [len(item) for item in ITEMS]


@pytest.fixture(scope="module")
def chunks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chunks")
    write_chunks([f"line {number}" for number in range(40)], folder, 10, progress=False)
    return folder


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


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)


BATCHES = {"LengthBatchSampler": sampler, "LengthBatchStream": stream, "ResumableLoader": loader}
ITERABLES = {
    "SequenceSource": lambda: SequenceSource(ITEMS, seed=3),
    "StreamSource": lambda: StreamSource(Stream(ITEMS), buffer_size=50),
}
NOT_STATES = [None, 0, 2**70, "junk", [], {}, [[0, 0]], {"junk": 1}, b"junk"]
OTHERS = {
    "SequenceLengthScheduler": scheduler_on_the_way,
    "TrainingMonitor": monitor,
    "TokenLR": lambda: TokenLR(optimizer(), warmup_tokens=10, decay_tokens=100),
}


def assert_works_or_refuses(target, state):
    before = copy.deepcopy(target.state_dict())
    try:
        target.load_state_dict(state)
    except (TypeError, ValueError):
        assert target.state_dict() == before
    json.dumps(target.state_dict())


def assert_continues_or_refuses(target, state):
    assert_works_or_refuses(target, state)
    with contextlib.suppress(ValueError):  # items that the state does not fit are found when they are read
        next(iter(target), None)


def advanced(target):
    for _ in itertools.islice(target, 3):
        pass
    return target


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("examples", EXAMPLES)
def test_counts(make, examples):
    target = make()
    explore(examples, changed(target.state_dict()), partial(assert_works_or_refuses, target))


@pytest.mark.parametrize("make", ITERABLES.values(), ids=ITERABLES)
@pytest.mark.parametrize("examples", EXAMPLES)
def test_positions(make, examples):
    target = advanced(make())
    explore(examples, changed(saved(target)), partial(assert_continues_or_refuses, target))


@pytest.mark.parametrize("examples", EXAMPLES)
def test_positions_in_chunk_files(chunks, examples):
    target = advanced(ChunkSource(chunks))
    explore(examples, changed(saved(target)), partial(assert_continues_or_refuses, target))


def saved(target):
    return json.loads(json.dumps(target.state_dict()))


@pytest.mark.parametrize(
    "make", [*OTHERS.values(), *ITERABLES.values(), *BATCHES.values()], ids=[*OTHERS, *ITERABLES, *BATCHES]
)
def test_what_is_not_a_state(make):
    target = make()
    before = target.state_dict()
    for junk in NOT_STATES:
        with pytest.raises((TypeError, ValueError), match="state_dict must"):
            target.load_state_dict(junk)
    assert target.state_dict() == before


@pytest.mark.parametrize("examples", EXAMPLES)
def test_states_in_checkpoints_of_trainers(examples):
    warmup = ScheduleState(scheduler(), {})
    before = warmup.state_dict()

    def check(state):
        try:
            warmup.resume(state)
        except (KeyError, TypeError, ValueError):
            assert warmup.state_dict() == before
        warmup.resume(before)

    explore(examples, changed(before), check)


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    [
        (scheduler, "progress", 10**40, "progress must fit into 64 bits"),
        (ITERABLES["SequenceSource"], "block", 2**40, "block of state_dict must be at most 2, got 1099511627776"),
        (ITERABLES["StreamSource"], "block", 1, "dataset of state_dict must be the dataset's state"),
        (monitor, "steps", 2**63, "steps must fit into 64 bits"),
    ],
)
def test_huge_numbers_are_refused_by_name(make, name, value, message):
    target = make()
    with pytest.raises(ValueError, match=message):
        target.load_state_dict({**target.state_dict(), name: value})
