"""TrainingMonitor: its counts, when it reads, and how it resumes."""

import json
import math
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from seqwarm_kernels.diagnostics import TrainingMonitor
from seqwarm_kernels.diagnostics.device_to_host import DelayedReader, Row

from .plain import model_of, statistics_of, train_step


@pytest.fixture
def model():
    return model_of()


@pytest.fixture
def optimizer(model):
    return torch.optim.AdamW(model.parameters())


def observed(optimizer, losses, threshold=1.2, **options):
    records = []
    monitor = TrainingMonitor(optimizer, records.append, spike_threshold=threshold, **options)
    for loss in losses:
        monitor.observe(loss)
    monitor.flush()
    return monitor, records


def test_ratios_are_to_the_smallest_loss_before(optimizer):
    monitor, records = observed(optimizer, [4.0, 2.0, 2.4, 2.5, 1.0, 1.5])
    assert [record.loss_ratio for record in records] == pytest.approx([1, 0.5, 1.2, 1.25, 0.5, 1.5])
    assert [record.is_spike for record in records] == [False, False, False, True, False, True]
    assert (monitor.steps, monitor.spikes, monitor.min_loss, monitor.max_loss_ratio) == (6, 2, 1.0, 1.5)
    assert [observed(optimizer, [2.0, 2.2, 3.0], limit)[0].spikes for limit in (1.0, 1.4, 1.5)] == [2, 1, 0]


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("losses", "ratios", "spikes", "min_loss", "max_loss_ratio"),
    [
        ([NAN, 4.0, -INF, INF, 2.0, NAN, 4.0], [None, 1, None, None, 0.5, None, 2], [0, 2, 3, 5, 6], 2.0, 2.0),
        ([INF, 4.0, 5.0], [None, 1, 1.25], [0, 2], 4.0, 1.25),
        ([1.0, 0.0, 0.0, 0.5, -1.0, 3.0, INF], [1, 0, None, None, None, None, None], [6], -1.0, 1.0),
        ([0.0, 0.0, 1.0, -INF], [1, None, None, None], [3], 0.0, 1.0),
        ([-2.0, -2.0, -4.0, -1.0, NAN], [1, None, None, None, None], [4], -4.0, 1.0),
        ([2.0, -1.0, -1.0, 2.0], [1, -0.5, None, None], [], -1.0, 1.0),
        ([NAN, INF], [None, None], [0, 1], None, None),
    ],
)
def test_losses_without_a_ratio(optimizer, losses, ratios, spikes, min_loss, max_loss_ratio):
    """Those that are not finite, and those after a loss that is not above zero. JSON has null for NaN and infinity."""
    monitor, records = observed(optimizer, losses)
    assert [json.loads(record.to_json())["loss_ratio"] for record in records] == ratios
    assert [math.isnan(record.loss_ratio) for record in records] == [ratio is None for ratio in ratios]
    assert [index for index, record in enumerate(records) if record.is_spike] == spikes
    assert (monitor.min_loss, monitor.max_loss_ratio, monitor.spikes) == (min_loss, max_loss_ratio, len(spikes))


def test_reads_after_read_every_steps(optimizer):
    records = []
    monitor = TrainingMonitor(optimizer, records.append, read_every=4)
    assert (monitor.steps, monitor.spikes, monitor.min_loss, monitor.max_loss_ratio) == (0, 0, None, None)
    seen = []
    for _ in range(9):
        monitor.observe(1.0)
        seen.append((len(records), monitor.steps))
    assert seen == [(0, 0)] * 3 + [(4, 4)] * 4 + [(8, 8)] * 2
    monitor.flush()
    assert len(records) == 9
    monitor.flush()
    assert len(records) == 9


def test_a_given_norm_and_further_numbers(model, optimizer):
    records = []
    with TrainingMonitor(optimizer, records.append) as monitor:
        loss = train_step(model, optimizer)
        monitor.observe(loss, grad_norm=torch.tensor([7.5]), learning_rate=0.25, seq_length=torch.tensor(64))
        monitor.observe(np.float32(0.5), grad_norm=3, rate=np.float64(0.25))
        optimizer.zero_grad()
        monitor.observe(loss)
    assert [record.grad_norm for record in records] == [7.5, 3.0, None]
    assert records[0].extra == {"learning_rate": 0.25, "seq_length": 64.0}
    assert (records[1].loss, records[1].extra) == (0.5, {"rate": 0.25})


def test_a_tensor_may_change_after_it_was_observed(optimizer):
    records, loss = [], torch.tensor(2.0, requires_grad=True)
    with TrainingMonitor(optimizer, records.append) as monitor:
        monitor.observe(loss)
        with torch.no_grad():
            loss.zero_()
    assert records[0].loss == 2.0


def test_a_resumed_monitor_counts_like_an_uninterrupted_one(optimizer):
    losses = [3.0, 1.0, math.nan, 1.5, 0.5, 0.7, 2.0]
    whole, all_records = observed(optimizer, losses, read_every=2)
    for stop in range(len(losses) + 1):
        first, records = observed(optimizer, losses[:stop], read_every=3)
        state = json.loads(json.dumps(first.state_dict(), allow_nan=False))
        assert first.last_record is (records[-1] if records else None)
        second = first if stop == 3 else TrainingMonitor(optimizer, records.append)
        second.load_state_dict(state)
        assert second.last_record is None
        for loss in losses[stop:]:
            second.observe(loss)
        assert second.state_dict() == whole.state_dict()
        assert [r.to_json() for r in records] == [r.to_json() for r in all_records]


def test_a_state_has_all_steps_observed_and_loading_drops_those_not_read(optimizer):
    records = []
    monitor = TrainingMonitor(optimizer, records.append, read_every=100)
    monitor.observe(1.0)
    state = monitor.state_dict()
    assert state == {"steps": 1, "spikes": 0, "min_loss": 1.0, "max_loss_ratio": 1.0}
    monitor.observe(2.0)
    monitor.load_state_dict(state)
    monitor.observe(3.0)
    monitor.flush()
    assert [(record.step, record.loss) for record in records] == [(1, 1.0), (2, 3.0)]


GOOD = {"steps": 1, "spikes": 0, "min_loss": 1.0, "max_loss_ratio": None}


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"steps": 1}, "max_loss_ratio"),
        ({**GOOD, "more": 1}, "more"),
        ({**GOOD, "steps": -1}, "steps"),
        ({**GOOD, "max_loss_ratio": math.inf}, "max_loss_ratio"),
    ],
)
def test_other_states_are_refused(optimizer, state, name):
    monitor = TrainingMonitor(optimizer)
    monitor.observe(5.0)
    with pytest.raises((ValueError, TypeError), match=name):
        monitor.load_state_dict(state)
    assert monitor.state_dict()["min_loss"] == 5.0


@pytest.mark.parametrize(
    ("loss", "numbers", "error"),
    [
        (torch.ones(2), {}, "loss"),
        (None, {}, "float"),
        (1.0, {"grad_norm": torch.ones(2)}, "grad_norm"),
        (1.0, {"variance_max": 1.0, "step": 3}, "step, variance_max"),
        (1.0, {"extra": 1.0}, "extra"),
    ],
)
def test_numbers_are_checked_before_a_step_counts(optimizer, loss, numbers, error):
    monitor = TrainingMonitor(optimizer)
    with pytest.raises((ValueError, TypeError), match=error):
        monitor.observe(loss, **numbers)
    assert monitor.state_dict()["steps"] == 0


class OnGpu(torch.Tensor):
    """In memory of the host, but says that it is on a GPU."""

    is_cuda = True


def test_numbers_of_a_gpu_arrive_one_block_later_whatever_the_default_device(monkeypatch):
    events, empty = [], torch.empty
    with torch.device("meta"):
        assert empty(0).is_meta  # torch notes its functions at the first of these calls
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options))
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(Mock()) or events[-1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    reader, found = DelayedReader(2), []
    for number in range(5):
        row = Row(number, torch.tensor([float(number), 1.0]).as_subclass(OnGpu))
        with torch.device("meta"):
            found.append(reader.add(row))
    assert found == [[], [], [], [(0, [0, 1]), (1, [1, 1])], []]
    assert [event.synchronize.called for event in events] == [True, False]
    assert reader.read_all() == [(2, [2, 1]), (3, [3, 1]), (4, [4, 1])]


@pytest.mark.gpu
def test_on_a_device_no_step_waits_and_rows_are_read_one_block_later():
    model = model_of().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    records, expected, seen = [], [], []
    monitor = TrainingMonitor(optimizer, records.append, read_every=4)
    for _ in range(11):
        loss = train_step(model, optimizer)
        expected.append([loss.item(), *statistics_of(optimizer)])
        torch.cuda.set_sync_debug_mode("error")
        try:
            monitor.observe(loss, learning_rate=0.1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen.append(len(records))
    assert seen == [0] * 7 + [4] * 4
    monitor.close()
    found = [[r.loss, r.variance_l1, r.variance_max, r.momentum_l1, r.momentum_max, r.grad_norm] for r in records]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-6)
    assert {record.extra["learning_rate"] for record in records} == {0.1}


def steps_of(output):
    return [call.args[0].step for call in output.call_args_list]


def methods_of(output):
    return [name for name, *_ in output.method_calls]


@pytest.mark.parametrize("first", [True, False])
def test_an_output_that_raises_does_not_affect_the_others(optimizer, first):
    broken, other = Mock(side_effect=[None, None, OSError("the disk is full"), *[None] * 17]), Mock()
    outputs = (broken, other) if first else (other, broken)
    monitor = TrainingMonitor(optimizer, *outputs, read_every=10)
    raised = 0
    for loss in [1.0] * 6 + [5.0] + [1.0] * 13:
        try:
            monitor.observe(loss)
        except OSError:
            raised += 1
    assert raised == 1
    assert steps_of(other) == steps_of(broken) == list(range(1, 21))
    assert (monitor.steps, monitor.spikes) == (20, 1)


@pytest.mark.parametrize("name", ["flush", "close"])
def test_all_outputs_are_closed(optimizer, name):
    broken, other = Mock(**{f"{name}.side_effect": OSError("the disk is full")}), Mock()
    with pytest.raises(OSError, match="the disk is full"), TrainingMonitor(optimizer, broken, other):
        pass
    assert methods_of(broken) == methods_of(other) == ["flush", "close"]


def test_if_training_fails_outputs_are_closed_and_its_own_error_is_raised(optimizer):
    output, broken = Mock(), Mock(**{"close.side_effect": OSError})
    with (
        pytest.raises(TypeError, match="float"),
        pytest.warns(UserWarning, match="could not be closed"),
        TrainingMonitor(optimizer, output, broken) as monitor,
    ):
        [monitor.observe(loss) for loss in (1.0, None)]
    for each in (output, broken):
        assert (steps_of(each), methods_of(each)) == ([1], ["flush", "close"])


def sharded_parameters():
    model = model_of()
    next(model.parameters()).ds_id = 0
    return torch.optim.AdamW(model.parameters())


def zero_optimizer():
    optimizer = torch.optim.AdamW(model_of().parameters())
    kind = type("ZeroOptimizer", (SimpleNamespace,), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"})
    return kind(optimizer=optimizer, param_groups=optimizer.param_groups, state=optimizer.state)


@pytest.mark.parametrize("make", [sharded_parameters, zero_optimizer])
def test_what_deepspeed_shards_warns(make):
    with pytest.warns(UserWarning, match="this rank's part of parameters that DeepSpeed ZeRO shards"):
        TrainingMonitor(make())
