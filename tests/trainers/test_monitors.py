"""What the Monitor of every trainer promises: the losses and norms of a loop written by hand, and the moments."""

from dataclasses import asdict, replace

import pytest

from ..diagnostics.plain import statistics_of
from .contract import oracle
from .contract.adapter import READ_EVERY
from .contract.cases import Case, Model
from .contract.table import CASES, each_case, each_trainer
from .test_contract import assert_close, assert_equal, first_training

pytestmark = pytest.mark.filterwarnings("ignore")  # hints of the trainers

WATCHED = {
    "truncate": replace(CASES["truncate"], is_watched=True),
    "accumulated": replace(CASES["truncate-padded"], is_watched=True, clip=0.1, rates=None),
    "flatten": replace(CASES["flatten-accumulated"], is_watched=True, clip=0.1),
    "packed": replace(CASES["packed-truncate"], is_watched=True),
}


def assert_records(records, expected, first=0):
    """Records are of the oracle's steps after `first`."""
    assert [record.step for record in records] == list(range(first + 1, expected.steps + 1))
    assert_close([record.loss for record in records], expected.losses[first:])
    assert_close([record.grad_norm for record in records], expected.norms[first:])


@each_case(WATCHED, fast=["truncate", "accumulated"])
def test_records_are_those_of_the_loop(adapter, case, tmp_path):
    expected = oracle.train(case, adapter.rule)
    assert case.clip is None or min(expected.norms) > case.clip
    training = adapter(case, Model(), tmp_path)
    assert_equal(training.run(), expected)
    assert_records(training.records, expected)
    assert_figures(training.logged(), training.records)


def assert_figures(logged, records):
    """The trainer's own log has the figures of the newest record that was read."""
    for step, figures in logged.items():
        newest = step // READ_EVERY * READ_EVERY
        own = {name.removeprefix("monitor/"): figures[name] for name in figures if name.startswith("monitor/")}
        if newest:
            record = asdict(records[newest - 1])
            spikes = sum(each.is_spike for each in records[:newest])
            assert own == {**{name: record[name] for name in ("step", "loss_ratio", "grad_norm")}, "spikes": spikes}
        else:
            assert own == {}


class Watched(Model):
    """Notes the optimizer's statistics after each step."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def note_step(self, optimizer, args, kwargs):
        super().note_step(optimizer, args, kwargs)
        self.rows.append(statistics_of(optimizer))


@each_trainer(has_monitor=True)
def test_records_have_the_moments_of_the_optimizer(adapter, tmp_path):
    model = Watched()
    training = adapter(Case(duration=8, accumulate=2, is_watched=True, adam=True), model, tmp_path)
    training.run()
    names = ("variance_l1", "variance_max", "momentum_l1", "momentum_max", "grad_norm")
    found = [[getattr(record, name) for name in names] for record in training.records]
    assert len(found) == 8
    assert_close(found, model.rows[-8:])  # Composer makes a step before, without effect


@each_trainer(has_monitor=True)
def test_a_resumed_training_goes_on_with_the_same_records(adapter, tmp_path):
    case = Case(is_watched=True, saves=True, evaluate_every=None)
    expected, half = oracle.train(case, adapter.rule), case.epoch_steps
    whole = adapter(case, Model(), tmp_path)
    whole.run()
    training = adapter(replace(case, saves=False), Model(seed=2), tmp_path)
    training.run(resume=half)
    assert_records(training.records, expected, half)
    assert_close([record.loss_ratio for record in training.records], [r.loss_ratio for r in whole.records[half:]])
    (one,), (other,) = whole.monitors, training.monitors
    assert one.monitor.spikes == other.monitor.spikes > 0


@each_trainer(has_monitor=True)
def test_a_checkpoint_without_a_monitor_counts_from_there(adapter, tmp_path):
    case = Case(saves=True, evaluate_every=None)
    adapter(case, Model(), tmp_path).fit()
    training = adapter(replace(case, saves=False, is_watched=True), Model(seed=2), tmp_path)
    training.run(resume=case.epoch_steps)
    assert_records(training.records, oracle.train(case, adapter.rule), case.epoch_steps)
    assert training.records[0].loss_ratio == 1.0


@each_trainer(has_monitor=True)
def test_after_an_interruption_a_training_starts_anew(adapter, tmp_path):
    case, model, by_hand = Case(is_watched=True, evaluate_every=None, fails=ArithmeticError), Model(), Model()
    training = adapter(case, model, tmp_path)
    first_training(training, model)
    expected = oracle.train(case, adapter.rule, by_hand)
    training.case = replace(case, fails=None)
    training.run()
    assert_records(training.records[: expected.steps], expected)
    assert_records(training.records[expected.steps :], oracle.train(training.case, adapter.rule, by_hand))
