"""Monitor in Composer's own trainer."""

import json

import pytest

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from composer import Callback
from composer.algorithms import GradientClipping

from seqwarm_kernels.diagnostics import JsonLines
from seqwarm_kernels.trainers.composer import Monitor

from ...diagnostics.plain import statistics_of
from .training import Run


class Plain(Callback):
    """The optimizer's statistics after each step, in plain numbers."""

    def __init__(self):
        self.rows = []

    def batch_end(self, state, logger):
        self.rows.append(statistics_of(state.optimizers[0]))


def numbers(record):
    return [record.variance_l1, record.variance_max, record.momentum_l1, record.momentum_max, record.grad_norm]


@pytest.mark.parametrize("microbatch", [4, 2])
def test_records_are_the_losses_and_the_optimizers_statistics(microbatch):
    records, plain = [], Plain()
    monitor = Monitor(records.append, read_every=3)
    run = Run("7ba", callbacks=[monitor, plain], device_train_microbatch_size=microbatch).fit()
    assert [record.step for record in records] == list(range(1, 8))
    assert [record.loss for record in records] == run.seen.losses
    for record, expected in zip(records, plain.rows, strict=True):
        assert numbers(record) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("microbatch", [4, 2])
def test_norms_are_those_before_clipping(microbatch):
    def norms(threshold):
        """The recorded norm of a step, and the norm of what the optimizer got."""
        records, plain = [], Plain()
        clipping, callbacks = GradientClipping("norm", threshold), [Monitor(records.append), plain]
        Run("1ba", clipping, callbacks=callbacks, device_train_microbatch_size=microbatch).fit()
        return records[0].grad_norm, plain.rows[0][-1]

    unclipped, got = norms(1e9)
    assert unclipped == pytest.approx(got, rel=1e-6)
    assert norms(0.01) == (unclipped, pytest.approx(0.01, rel=1e-3))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_training_goes_on_with_the_same_records(tmp_path):
    whole = Monitor(JsonLines(tmp_path / "whole.jsonl"), spike_threshold=1.001)
    Run("8ba", callbacks=[whole]).fit()
    path, folder = tmp_path / "parts.jsonl", str(tmp_path / "checkpoints")
    saving = {"save_folder": folder, "save_interval": "3ba", "save_overwrite": True}
    Run("8ba", callbacks=[Monitor(JsonLines(path), spike_threshold=1.001)], **saving).fit()
    assert len(lines(path)) == 8
    second = Monitor(JsonLines(path), spike_threshold=1.001)
    Run("8ba", callbacks=[second], load_path=f"{folder}/ep0-ba3-rank0.pt").fit()
    assert lines(path) == lines(tmp_path / "whole.jsonl")
    assert second.monitor.state_dict() == whole.monitor.state_dict()


def test_a_further_fit_continues_the_count():
    records = []
    run = Run("3ba", callbacks=[Monitor(records.append)]).fit()
    run.trainer.fit(duration="2ba")
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    assert records[3].loss_ratio != 1.0


def test_loggers_get_the_figures_of_the_newest_record():
    records = []
    run = Run("8ba", callbacks=[Monitor(records.append, read_every=3, spike_threshold=1.0)]).fit()
    assert run.metric("monitor/step") == [3, 3, 3, 6, 6, 6]
    for name in ("loss_ratio", "variance_max", "variance_l1", "momentum_max", "momentum_l1", "grad_norm"):
        assert run.metric(f"monitor/{name}") == [getattr(records[step - 1], name) for step in (3, 3, 3, 6, 6, 6)]
    spikes = [sum(record.is_spike for record in records[:step]) for step in (3, 3, 3, 6, 6, 6)]
    assert run.metric("monitor/spikes") == spikes
