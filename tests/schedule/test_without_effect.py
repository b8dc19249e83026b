"""A schedule that changes no batch says so: nobody steps it, no batch reaches its model, or none is long enough."""

import copy
import gc
import linecache
import pickle
import warnings

import pytest
import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.schedule import scheduler as scheduler_module

from ..support.schedules import BATCH, IDS, Identity, resize_often


def resize_and_count_nothing(scheduler, batches):
    for _ in range(batches):
        scheduler.resize(BATCH, copy=False)
        scheduler.step(0)


def forward_often(scheduler, batches):
    model = Identity()
    attachment = scheduler.attach(model)
    for _ in range(batches):
        model(BATCH["input_ids"])
    attachment.remove()


@pytest.mark.parametrize("use", [resize_often, forward_often])
def test_a_scheduler_that_nobody_steps(use):
    scheduler = SequenceLengthScheduler(16, 32, duration=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(scheduler, 499)
    copies = [copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))]
    for unstepped in (scheduler, *copies):
        with pytest.warns(
            UserWarning,
            match=r"the length is still 16 after 500 batches: call scheduler.step\(\) after each optimizer step",
        ) as caught:
            use(unstepped, 1)
        line = linecache.getline(caught[0].filename, caught[0].lineno)
        assert ("model(" if use is forward_often else "scheduler.resize(") in line
        assert caught[0].filename == use.__code__.co_filename
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use(unstepped, 600)


def test_no_warning_of_a_scheduler_that_somebody_steps():
    stepped, loaded, moved, without_ramp, full = (
        SequenceLengthScheduler(16, longest, duration=duration, unit="token")
        for longest, duration in ((32, 1000), (32, 1000), (32, 1000), (16, 1000), (32, 0))
    )
    state = loaded.state_dict()
    stepped.step(1)
    loaded.load_state_dict({**state, "progress": 1000})  # the ramp is over
    moved.progress = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scheduler in (stepped, loaded, moved, without_ramp, full):
            resize_often(scheduler, 600)


@pytest.mark.parametrize("use", [resize_often, resize_and_count_nothing])
def test_a_resumed_scheduler_that_nobody_steps(use):
    saved, scheduler = (SequenceLengthScheduler(16, 32, duration=1000) for _ in range(2))
    saved.step(500)
    scheduler.step(1)
    scheduler.load_state_dict(saved.state_dict())
    with pytest.warns(UserWarning, match="the length is still 24 after 500 batches: call scheduler.step"):
        use(scheduler, 600)
    scheduler.load_state_dict(saved.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resize_often(scheduler, 499)
        scheduler.step()
        resize_often(scheduler, 600)


def test_an_attached_model_that_is_never_called(monkeypatch):
    """Hooks do not run in other methods than `__call__`."""
    monkeypatch.setattr(scheduler_module, "_BATCHES_BEFORE_WARNING", 3)
    model, called = nn.Embedding(128, 2), nn.Embedding(128, 2)
    scheduler, other = (SequenceLengthScheduler(4, 8, duration=10) for _ in range(2))
    scheduler.attach(model)
    other.attach(called)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model.forward(IDS)
            scheduler.step()
    with pytest.warns(
        UserWarning, match=r"^step\(\) was called 3 times, and no batch has gone through the attached model"
    ):
        scheduler.step()
    called(IDS)
    removed, deleted = (SequenceLengthScheduler(4, 8, duration=10) for _ in range(2))
    removed.attach(nn.Embedding(2, 2)).remove()
    deleted.attach(nn.Embedding(2, 2))
    gc.collect()
    copied = copy.deepcopy(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for schedule in (scheduler, other, removed, deleted, copied, pickle.loads(pickle.dumps(other))):
            schedule.step(4)
            for _ in range(4):
                schedule.step()


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("mode", ["truncate", "reshape"])
def test_a_schedule_that_cuts_nothing(mode, attached):
    scheduler, model = SequenceLengthScheduler(64, 128, duration=10000), Identity()
    if attached:
        scheduler.attach(model, mode=mode)

    def train(steps):
        for _ in range(steps):
            model(BATCH["input_ids"]) if attached else scheduler.resize(BATCH, mode=mode)
            scheduler.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(499)
    with pytest.warns(UserWarning, match="none of 500 batches was cut: .* the current length of 64 tokens") as caught:
        train(1)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(600)


def test_a_schedule_that_cuts_some_batches():
    some, full = SequenceLengthScheduler(16, 32, duration=10000), SequenceLengthScheduler(16, 32, duration=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        some.resize(BATCH)
        for scheduler in (some, full):
            for _ in range(600):
                scheduler.resize({"input_ids": torch.zeros(1, 9)}, copy=False)
                scheduler.step()
