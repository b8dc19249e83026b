"""Monitor in a real Lightning Trainer, against the losses of the module and the state of its optimizer."""

import csv
import json

import pytest
import torch

from seqwarm_kernels.diagnostics import JsonLines

pytest.importorskip("lightning.pytorch")

from seqwarm_kernels.trainers.lightning import Monitor, SequenceLengthWarmup

from ..diagnostics.plain import statistics_of
from .test_lightning import LEARNING_RATE, Model, loader, schedule, trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's hints on workers, loggers and intervals


class Watched(Model):
    """Collects its optimizer's moments after each step and its norms before clipping, in plain numbers."""

    def __init__(self):
        super().__init__()
        self.rows, self.norms = [], []

    def on_before_zero_grad(self, optimizer):
        if optimizer.state:
            self.rows.append(statistics_of(optimizer)[:-1])

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(statistics_of(optimizer)[-1])


def numbers(record):
    return [record.variance_l1, record.variance_max, record.momentum_l1, record.momentum_max]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_records_are_the_losses_and_the_optimizers_statistics(accumulate):
    model, records = Watched(), []
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1}
    trainer(Monitor(records.append, read_every=3), **settings).fit(model, loader(), loader())
    losses = torch.tensor(model.losses)[:8].view(-1, accumulate).mean(dim=1)
    assert [record.step for record in records] == list(range(1, 8 // accumulate + 1))
    assert [record.loss for record in records] == pytest.approx(losses.tolist(), rel=1e-6)
    for record, expected in zip(records, model.rows, strict=False):  # zero_grad comes with the next step
        assert numbers(record) == pytest.approx(expected, rel=1e-6)
    assert len(model.rows) == len(records) - 1
    assert [record.grad_norm for record in records] == pytest.approx(model.norms, rel=1e-6)
    assert min(model.norms) > 0.1


def test_with_a_warmup():
    model, records = Model(), []
    trainer([Monitor(records.append), SequenceLengthWarmup(schedule())]).fit(model, loader())
    assert [record.loss for record in records] == pytest.approx(model.losses, rel=1e-6)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_training_goes_on_with_the_same_records(tmp_path):
    whole = Monitor(JsonLines(tmp_path / "whole.jsonl"))
    trainer(whole, max_epochs=2).fit(Model(), loader())
    path, checkpoint = tmp_path / "parts.jsonl", tmp_path / "stopped.ckpt"
    first = trainer(Monitor(JsonLines(path)), max_epochs=1)
    first.fit(Model(), loader())
    first.save_checkpoint(checkpoint)
    with open(path, "a") as file:  # a record of a step after the checkpoint
        file.write(json.dumps({"step": 9}) + "\n")
    second = Monitor(JsonLines(path))
    trainer(second, max_epochs=2).fit(Model(), loader(), ckpt_path=checkpoint)
    assert lines(path) == lines(tmp_path / "whole.jsonl")
    assert second.monitor.state_dict() == whole.monitor.state_dict()


def test_a_checkpoint_without_a_monitor_counts_from_there(tmp_path):
    first = trainer([], max_epochs=1)
    first.fit(Model(), loader())
    first.save_checkpoint(tmp_path / "stopped.ckpt")
    records = []
    trainer(Monitor(records.append), max_epochs=2).fit(Model(), loader(), ckpt_path=tmp_path / "stopped.ckpt")
    assert [record.step for record in records] == list(range(9, 17))


def test_a_further_fit_continues_the_count():
    records = []
    training = trainer(Monitor(records.append), max_epochs=1)
    model = Model()
    training.fit(model, loader())
    training.fit_loop.max_epochs = 2
    training.fit(model, loader())
    assert [record.step for record in records] == list(range(1, 17))
    assert records[8].loss_ratio != 1.0


def test_a_checkpoint_that_is_only_tested_changes_nothing(tmp_path):
    training = trainer(Monitor())
    training.fit(Model(), loader())
    training.save_checkpoint(tmp_path / "end.ckpt")
    other = Monitor()
    fresh = trainer(other)
    fresh.test(Model(), loader(), ckpt_path=tmp_path / "end.ckpt", verbose=False)
    fresh.fit(Model(), loader())
    assert other.monitor.state_dict()["steps"] == 8


def test_records_are_written_when_training_is_interrupted():
    class Interrupted(Model):
        def training_step(self, batch, batch_idx):
            if batch_idx == 5:
                raise RuntimeError("interrupted")
            return super().training_step(batch, batch_idx)

    records = []
    with pytest.raises(RuntimeError, match="interrupted"):
        trainer(Monitor(records.append)).fit(Interrupted(), loader())
    assert len(records) == 5


def test_more_than_one_optimizer_raises():
    class Two(Model):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.Adam(part.parameters()) for part in (self.embedding, self.head)]

    with pytest.raises(ValueError, match="needs a training with one optimizer, got 2"):
        trainer(Monitor()).fit(Two(), loader())


def test_an_optimizer_without_moments_is_watched_for_the_rest():
    class Plain(Model):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)

    model, records = Plain(), []
    trainer(Monitor(records.append)).fit(model, loader())
    assert [record.loss for record in records] == pytest.approx(model.losses, rel=1e-6)
    assert all(numbers(record)[:4] == [None] * 4 and record.grad_norm > 0 for record in records)


class Skips(Watched):
    """Returns None for the batches of these indices."""

    def __init__(self, *skipped):
        super().__init__()
        self.skipped = skipped

    def training_step(self, batch, batch_idx):
        return None if batch_idx in self.skipped else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("skipped", [(0,), (2, 3), (7,)])
def test_a_step_without_a_batch_has_no_record(tmp_path, skipped):
    model, path = Skips(*skipped), tmp_path / "monitor.jsonl"
    monitor = Monitor(JsonLines(path), read_every=3)
    training = trainer(monitor)
    training.fit(model, loader())
    assert [line["step"] for line in lines(path)] == [step for step in range(1, 9) if step - 1 not in skipped]
    assert [line["loss"] for line in lines(path)] == pytest.approx(model.losses, rel=1e-6)
    assert monitor.monitor.steps == training.global_step == 8
    assert monitor.monitor.spikes == 0


def test_one_of_the_accumulated_batches_may_be_skipped():
    model, records = Skips(1), []
    trainer(Monitor(records.append), accumulate_grad_batches=2).fit(model, loader())
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert records[0].loss == pytest.approx(model.losses[0], rel=1e-6)


def test_counts_include_steps_without_a_batch(tmp_path):
    monitor, model = Monitor(), Skips(2)
    training = trainer(monitor, max_epochs=1)
    training.fit(model, loader())
    training.save_checkpoint(tmp_path / "stopped.ckpt")
    smallest = monitor.monitor.min_loss
    training.fit_loop.max_epochs = 2
    training.fit(model, loader())
    resumed = Monitor()
    trainer(resumed, max_epochs=2).fit(Skips(*range(8)), loader(), ckpt_path=tmp_path / "stopped.ckpt")
    assert monitor.monitor.steps == resumed.monitor.steps == 16
    assert monitor.monitor.min_loss <= smallest == resumed.monitor.min_loss


def test_steps_without_a_loss_are_counted_and_have_no_record():
    records = []
    monitor = Monitor(records.append)
    trainer(monitor).fit(Skips(*range(8)), loader())
    assert monitor.monitor.steps == 8
    assert not records


FIGURES = ("loss_ratio", "variance_l1", "variance_max", "momentum_l1", "momentum_max", "grad_norm")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_loggers_get_the_figures_of_the_newest_record(tmp_path, accumulate):
    from lightning.pytorch.loggers import CSVLogger

    records = []
    monitor = Monitor(records.append, read_every=3, spike_threshold=1.0)
    settings = {"accumulate_grad_batches": accumulate, "log_every_n_steps": 2, "max_epochs": accumulate}
    trainer([monitor, SequenceLengthWarmup(schedule())], logger=CSVLogger(tmp_path), **settings).fit(Model(), loader())
    (path,) = tmp_path.rglob("metrics.csv")
    with path.open() as file:
        logs = [*csv.DictReader(file)]
    assert [log["seq_length"] for log in logs] == ["4.0", "12.0", "16.0", "16.0"]
    assert [log["monitor/step"] for log in logs] == ["", "3.0", "6.0", "6.0"]
    for log in logs[1:]:
        record = records[int(float(log["monitor/step"])) - 1]
        assert [float(log[f"monitor/{name}"]) for name in FIGURES] == [getattr(record, name) for name in FIGURES]
        assert float(log["monitor/spikes"]) == sum(record.is_spike for record in records[: record.step])
    assert "monitor/loss" not in logs[1]
    assert (float(logs[-1]["monitor/spikes"]) > 0) == (accumulate == 1)
