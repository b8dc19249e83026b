"""What every trainer promises: losses, weights, lengths, counts, learning rates and records of a loop written by hand.

Trainers are adapters, contract/huggingface.py and so on, and cases rows of contract/table.py.
"""

import warnings
from dataclasses import asdict, replace

import pytest
import torch

from ..diagnostics.plain import statistics_of
from ..support.ranks import leave_group, run_ranks
from .contract import oracle
from .contract.adapter import READ_EVERY
from .contract.cases import LENGTH, Case, Model
from .contract.record import combined
from .contract.table import CASES, DECODERS, FLATTEN, adapter_of, each_case, each_trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # hints of the trainers


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # Composer weighs microbatches in float32


def assert_equal(record, expected):
    """A record is the oracle's, from its first step on."""
    first = record.first
    assert record.lengths == expected.lengths[first:]
    assert_close(record.losses, expected.losses[first:])
    assert_close(record.rates, expected.rates[first:])
    evaluations = [each for each in expected.evaluations if each[0] > first]
    assert [each[:2] for each in record.evaluations] == [each[:2] for each in evaluations]
    assert_close([each[2] for each in record.evaluations], [each[2] for each in evaluations])
    assert_close(record.weights, expected.weights)


def logged_by(case, expected, first=0):
    """seq_length and train_tokens that the log should have of the steps after `first`."""
    figures = enumerate(zip(expected.scheduled, expected.train_tokens, strict=True), 1)
    return {step: pair for step, pair in figures if step % case.log_every == 0 and step > first}


def pairs_of(logged, first=0):
    return {step: (each["seq_length"], each["train_tokens"]) for step, each in logged.items() if step > first}


def assert_logged(training, expected, first=0):
    """The trainer's log, its schedule and its monitor agree with the oracle."""
    assert pairs_of(training.logged(), first) == logged_by(training.case, expected, first)
    assert training.progress() in (None, expected.progress)
    if training.monitors:
        newest = training.records[first - expected.steps :]
        assert_records(newest, expected, first)
        if not first:
            assert_figures(training.logged(), newest)


def assert_records(records, expected, first=0):
    """A monitor's records are of the oracle's steps after `first`."""
    assert [record.step for record in records] == list(range(first + 1, expected.steps + 1))
    assert_close([record.loss for record in records], expected.losses[first:])
    assert_close([record.grad_norm for record in records], expected.norms[first:])


def assert_figures(logged, records):
    """The trainer's own log has the figures of the newest record that was read."""
    for step, figures in logged.items():
        own = {name.removeprefix("monitor/"): figures[name] for name in figures if name.startswith("monitor/")}
        read = records[: step // READ_EVERY * READ_EVERY]
        if read:
            newest = asdict(read[-1])
            expected = {name: newest[name] for name in ("step", "loss_ratio", "grad_norm")}
            assert own == {**expected, "spikes": sum(each.is_spike for each in read)}
        else:
            assert own == {}


@each_case(CASES, fast=["truncate-padded", "last-token", "packed-truncate", "segments"])
def test_a_training_equals_the_loop(adapter, case, tmp_path):
    expected = oracle.train(case, adapter.rule)
    assert len({*expected.lengths}) > 1
    assert case.clip is None or min(expected.norms) > case.clip
    training = adapter(case, Model(), tmp_path)
    assert_equal(training.run(), expected)
    assert_logged(training, expected)


@each_case(DECODERS, fast=["llama-sdpa"])
def test_segments_train_as_flatten(adapter, case, tmp_path):
    """Step by step, in float64, but for Composer's weights of microbatches."""
    modes = {"segments": case, "flatten": replace(case, options=FLATTEN)}
    found, expected = (adapter(each, each.model(), tmp_path / name).run() for name, each in modes.items())
    assert found.lengths == expected.lengths
    assert {*found.lengths} == {4, 8, 12, 16}
    exact = 1e-6 if adapter.rule.loss == "rows" else 1e-12
    torch.testing.assert_close(found.losses, expected.losses, rtol=exact, atol=0)
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=exact)


RESUMED = {
    name: replace(CASES[name], saves=True, evaluate_every=None)
    for name in ("truncate-padded", "last-token", "packed-reshape")
} | {"logged-seldom": Case(saves=True, evaluate_every=None, log_every=3)}


@each_case(RESUMED, fast=["truncate-padded"])
def test_a_resumed_training_goes_on_in_the_middle_of_the_warmup(adapter, case, tmp_path):
    expected, half = oracle.train(case, adapter.rule), case.epoch_steps
    whole = adapter(case, Model(), tmp_path)
    whole.fit()
    training = adapter(replace(case, saves=False), Model(seed=2), tmp_path)
    record = training.run(resume=half)
    assert record.first == half
    assert_equal(record, expected)
    assert_logged(training, expected, first=half)
    for one, other in zip(whole.monitors, training.monitors, strict=True):
        assert_close([r.loss_ratio for r in training.records], [r.loss_ratio for r in whole.records[half:]])
        assert one.monitor.spikes == other.monitor.spikes > 0


@each_trainer(has_monitor=True)
def test_with_a_checkpoint_without_a_monitor_its_records_start_there(adapter, tmp_path):
    case = Case(saves=True, evaluate_every=None)
    adapter(case, Model(), tmp_path).fit()
    training = adapter(replace(case, saves=False, is_watched=True), Model(seed=2), tmp_path)
    training.run(resume=case.epoch_steps)
    assert_records(training.records, oracle.train(case, adapter.rule), case.epoch_steps)
    assert training.records[0].loss_ratio == 1.0


@each_trainer(has_monitor=True)
def test_records_have_the_moments_of_the_optimizer(adapter, tmp_path, monkeypatch):
    expected = []
    monkeypatch.setattr(Model, "note_step", lambda model, optimizer, *_: expected.append(statistics_of(optimizer)))
    training = adapter(Case(duration=8, accumulate=2, is_watched=True, adam=True), Model(), tmp_path)
    training.run()
    names = ("variance_l1", "variance_max", "momentum_l1", "momentum_max", "grad_norm")
    found = [[getattr(record, name) for name in names] for record in training.records]
    assert len(found) == 8
    assert_close(found, expected[-8:])  # Composer makes a step before, without effect


ENDS = {
    "max-steps": Case(rates="StepByTokens", max_steps=5),
    "total-tokens": Case({}, "token", 120, rates="TokenLR by a function", total_tokens=70),
    "error": Case({}, "token", 120, rates="TokenLR", fails=ArithmeticError),
    "interrupt": Case(rates="StepByTokens", fails=KeyboardInterrupt),
}
ENDING = {name: replace(case, evaluate_every=None, is_watched=True) for name, case in ENDS.items()}


@each_case(ENDING, fast=["total-tokens"])
def test_after_a_training_that_ends_early_another_one_starts_anew(adapter, case, tmp_path, recwarn):
    by_hand, model = Model(), Model()
    training = adapter(case, model, tmp_path)
    first = first_training(training, model)
    expected = oracle.train(case, adapter.rule, by_hand)
    assert 5 <= first.steps < 8
    assert_equal(first, expected)
    short = [each for each in recwarn if "the training end" in str(each.message)]
    assert len(short) == (adapter.warns_of_short and case.fails is None)

    model.calls.clear()
    training.evaluate()
    assert_evaluation(training.record(), case, by_hand)
    again = training.run()
    if training.monitors:
        assert_records(training.records[: first.steps], expected)
    expected = oracle.train(replace(case, fails=None), adapter.rule, by_hand)
    assert_equal(again, expected)
    assert_logged(training, expected)


SHORT = {
    "max-steps": Case({}, "step", 20, max_steps=5),
    "epochs": Case({}, "step", 20),
    "samples": Case({}, "sample", 100, max_steps=5),
}


@each_case(SHORT, fast=["max-steps", "epochs"], warns_of_short=True)
def test_a_training_that_is_too_short_warns_as_early_as_that_is_known(adapter, case, tmp_path):
    training, by_hand = adapter(case, Model(), tmp_path), oracle.train(case, adapter.rule)
    warnings.filterwarnings("error", message="the training ends at")  # until the end of the test
    with pytest.raises(UserWarning, match=f"{case.duration} {case.unit}s, and the training takes {by_hand.progress}"):
        training.run()
    is_known = case.unit == "step" and (case.max_steps or adapter.knows_steps_of_epochs)
    assert training.record().steps == (0 if is_known else by_hand.steps)


def first_training(training, model):
    if training.case.fails is None:
        return training.run()
    model.fails = training.case.fails
    with pytest.raises((model.fails, SystemExit)):  # Lightning exits on an interrupt
        training.run()
    model.fails = None
    return training.record()


def assert_evaluation(record, case, by_hand):
    expected = oracle.evaluate(case, by_hand, 0)
    assert [each[:2] for each in record.evaluations] == [(0, LENGTH)] * len(expected)
    assert_close([each[2] for each in record.evaluations], [each[2] for each in expected])


@each_trainer(ends_by_tokens=True)
def test_a_resumed_training_ends_by_tokens_and_has_the_schedule_of_its_checkpoint(adapter, tmp_path):
    case = replace(CASES["truncate"], saves=True, evaluate_every=None)
    expected, half = oracle.train(case, adapter.rule), case.epoch_steps
    adapter(case, Model(), tmp_path).fit()
    ends = replace(case, saves=False, total_tokens=expected.train_tokens[half])  # of one more step
    assert adapter(ends, Model(seed=2), tmp_path).run(resume=half).steps == half + 1
    refused = [(replace(ends, total_tokens=expected.train_tokens[half - 1]), "total_tokens")]
    if adapter.keeps_schedule:
        refused.append((replace(case, duration=11), "duration is 10 in the state, 11 here"))
    for other, message in refused:
        with pytest.raises(ValueError, match=message):
            adapter(other, Model(), tmp_path).fit(resume=half)


#: Each step has the batches of both ranks, so there are half as many.
ON_TWO_RANKS = {
    name: replace(CASES[name], duration=4) if CASES[name].unit == "step" else CASES[name]
    for name in ("truncate", "truncate-padded", "last-token", "reshape-pad", "flatten", "packed-truncate", "segments")
}


def one_of_two(rank, port, trainer, folder):
    adapter, found = adapter_of(trainer), {}
    adapter.join_ranks(rank, port)
    for name, case in ON_TWO_RANKS.items():
        if adapter.supports(case):
            training = adapter(case, Model(), folder / name)
            if name == "truncate":
                training.evaluate()  # before any training
            found[name] = (training.run(), training.logged(), training.progress())
    torch.save(found, folder / f"{rank}.pt")
    leave_group()


@pytest.mark.slow
@each_trainer()
def test_two_ranks_train_as_the_loop(adapter, tmp_path):
    run_ranks(one_of_two, adapter.__module__.rpartition(".")[2], tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    for name, case in ON_TWO_RANKS.items():
        if not adapter.supports(case):
            continue
        expected = oracle.train(case, adapter.rule, world_size=2)
        records = [rank[name][0] for rank in ranks]
        losses = [
            combined([(1, loss) for loss in parts], adapter.rule.loss)
            for parts in zip(*(record.losses for record in records), strict=True)
        ]
        assert_close(losses, expected.losses)
        for record, logged, progress in (rank[name] for rank in ranks):
            assert_close(record.rates, expected.rates)
            assert_close(record.weights, expected.weights)
            assert {each[:2] for each in record.evaluations} <= {each[:2] for each in expected.evaluations}
            assert pairs_of(logged) == logged_by(case, expected)
            assert progress in (None, expected.progress)
        assert [max(pair) for pair in zip(*(record.lengths for record in records), strict=True)] == expected.lengths
