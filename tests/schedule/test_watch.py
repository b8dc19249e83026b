"""A schedule that has no effect says so once, with what was counted."""

import copy
import linecache
import pickle
import warnings
from unittest.mock import Mock

import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler, resize_batch
from seqwarm_kernels.schedule import watch

from ..support.schedules import Model, compiled_in_place, tokens

COUNTS = (
    "^{}: {} batches were resized to {} tokens, {} of them were longer, "
    r"{}and step\(\) was called {} times$"
)


def counts(batches, length, cut, steps, labels="", problem="the schedule may have no effect"):
    return COUNTS.format(problem, batches, length, cut, labels, steps)


LOST = "all labels of some batches were cut off"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(watch, "PATIENCE", 5)


@pytest.fixture
def schedule():
    return SequenceLengthScheduler(4, 16, duration=1000)


def resize_often(schedule, batches, steps=1, batch=None):
    for _ in range(batches):
        schedule.resize({"input_ids": tokens()} if batch is None else batch)
        if steps:
            schedule.step(steps)


def silent(use, *arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(*arguments, **options)


def test_nobody_steps(schedule):
    silent(resize_often, schedule, 4, steps=0)
    with pytest.warns(UserWarning, match=counts(5, 4, 5, 0)) as caught:
        resize_often(schedule, 1, steps=0)
    assert "schedule.resize(" in linecache.getline(caught[0].filename, caught[0].lineno)
    assert caught[0].filename == __file__
    silent(resize_often, schedule, 20, steps=0)  # says it once


@pytest.mark.parametrize("prepared", [lambda model: model, compiled_in_place])
def test_nobody_steps_the_schedule_of_an_attached_model(schedule, prepared):
    model = prepared(Model())
    schedule.attach(model)
    for _ in range(4):
        model(tokens())
    with pytest.warns(UserWarning, match=counts(5, 4, 5, 0)) as caught:
        model(tokens())
    assert [warning.filename for warning in caught if "schedule" in str(warning.message)] == [__file__]
    silent(model, tokens())


def test_nothing_is_cut(schedule):
    silent(resize_often, schedule, 4, batch={"input_ids": tokens(length=4)})
    with pytest.warns(UserWarning, match=counts(5, 4, 0, 4)):
        resize_often(schedule, 1, batch={"input_ids": tokens(length=4)})


def test_no_batch_comes_through_the_attached_model(schedule):
    """Hooks do not run in other methods than `__call__`."""
    model = Model()
    schedule.attach(model)
    for _ in range(4):
        model.forward(tokens())
        silent(schedule.step)
    with pytest.warns(UserWarning, match=counts(0, 4, 0, 5)):
        schedule.step()


@pytest.mark.parametrize(
    ("name", "ignored"), [("labels", -100), ("decoder_labels", -100), ("targets", -1), ("loss_mask", 0)]
)
def test_all_labels_of_some_batches_are_cut_off(schedule, name, ignored):
    late = {"input_ids": tokens(), name: torch.full((2, 16), ignored)}
    late[name][:, 10:] = 3
    some = {**late, name: torch.full((2, 16), 3)}
    for batch in (late, late, some):
        silent(resize_often, schedule, 1, batch=batch)
    with pytest.warns(UserWarning, match=counts(5, 4, 5, 4, "3 of 5 with labels kept one, ", LOST)):
        resize_often(schedule, 2, batch=some)


def test_lost_labels_are_reported_at_the_full_length():
    schedule = SequenceLengthScheduler(4, 16, duration=2)
    late = {"input_ids": tokens(), "labels": torch.full((2, 16), -100)}
    late["labels"][0, -1] = 1
    silent(resize_often, schedule, 2, batch=late)
    with pytest.warns(UserWarning, match=f"{LOST}: 2 batches .* 0 of 2 with labels kept one"):
        resize_often(schedule, 1, batch=late)


def one_token(value, other):
    entries = torch.full((2, 16), other)
    entries[1, 2] = value
    return entries


SILENT = [
    {},
    {"labels": torch.ones(2, 16, dtype=torch.int64)},
    {"labels": torch.ones(2)},
    {"labels": one_token(0, -1)},  # the loss counts a label of 0
    {"loss_mask": one_token(1, 0)},
    {"labels": one_token(0, -1), "decoder_labels": torch.arange(16).expand(2, 16) - 15},  # one entry keeps a label
    {"labels": torch.full((2, 16), -100)},  # had none before
    {"labels": torch.full((2, 16), -100.0)},
    {"labels": torch.zeros(2, 16, dtype=torch.uint16)},
    {"loss_mask": torch.zeros(2, 16, dtype=torch.uint16)},
    {"input_ids": tokens().to("meta"), "labels": torch.zeros(2, 16, dtype=torch.int64, device="meta")},
    {"input_ids": torch.ones(0, 16), "labels": torch.ones(0, 16, dtype=torch.int64)},
]


@pytest.mark.parametrize("entries", SILENT, ids=range(len(SILENT)))
def test_a_schedule_with_an_effect_is_silent(schedule, entries):
    """Lengths alone need no batch, and assigned progress is a step."""
    batch = {"input_ids": tokens(), **entries}
    for _ in range(20):
        silent(schedule.step)
    for progress in range(4):
        silent(resize_often, schedule, 1, steps=0, batch=batch)
        schedule.progress = progress
    silent(resize_often, schedule, 20, batch=batch)
    assert schedule.listeners == []


def test_the_full_length_needs_no_watch():
    for schedule in (SequenceLengthScheduler(16, 16, duration=1000), SequenceLengthScheduler(4, 16, duration=0)):
        silent(resize_often, schedule, 1, steps=0)
        assert schedule.listeners == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda schedule: pickle.loads(pickle.dumps(schedule))])
def test_a_copy_counts_anew(schedule, copied):
    resize_often(schedule, 4, steps=0)
    other = copied(schedule)
    silent(resize_often, other, 4, steps=0)
    with pytest.warns(UserWarning, match=counts(5, 4, 5, 0)):
        resize_often(other, 1, steps=0)
    with pytest.warns(UserWarning, match=counts(5, 4, 5, 0)):
        resize_often(schedule, 1, steps=0)


def test_listeners_can_be_replaced(schedule):
    listener, shapes = Mock(), []
    listener.on_resize.side_effect = lambda *arguments: shapes.append([x["input_ids"].shape for x in arguments[1:]])
    schedule.listeners = [listener]
    schedule.resize({"input_ids": tokens()}, return_info=True)
    schedule.step(3)
    schedule.attach(model := Model())
    model(tokens())
    assert [name for name, *_ in listener.method_calls] == ["on_resize", "on_step", "on_attach", "on_resize"]
    assert all(arguments[0] is schedule for _, arguments, _ in listener.method_calls)
    assert shapes == [[(2, 16), (2, 4)]] * 2
    schedule.listeners = []
    silent(resize_often, schedule, 20, steps=0)


def test_nothing_is_told_while_a_graph_is_traced(schedule):
    compiled = torch.compile(lambda batch: schedule.resize(batch), backend="eager", fullgraph=True)
    batch = {"input_ids": tokens()}
    torch.testing.assert_close(compiled(batch), resize_batch(batch, 4))
    assert schedule.listeners[0].batches == 0
