"""What Monitor promises in a Lightning Trainer alone; test_monitors.py has the rest."""

import pytest
import torch

pytest.importorskip("lightning.pytorch")

from seqwarm_kernels.trainers.lightning import Monitor

from ..support.lightning import quiet_trainer as trainer
from .test_lightning import Model, loader

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's hints on workers, loggers and intervals


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


def test_more_than_one_optimizer_raises():
    class Two(Model):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.Adam(part.parameters()) for part in (self.embedding, self.head)]

    with pytest.raises(ValueError, match="optimizer"):
        trainer(Monitor()).fit(Two(), loader())


class Skips(Model):
    """Returns None for the batches of these indices."""

    def __init__(self, *skipped):
        super().__init__()
        self.skipped = skipped

    def training_step(self, batch, batch_idx):
        return None if batch_idx in self.skipped else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("skipped", [(0,), (2, 3), (7,), range(8)])
def test_a_step_without_a_batch_has_no_record_and_is_counted(tmp_path, skipped):
    model, records = Skips(*skipped), []
    monitor = Monitor(records.append, read_every=3)
    training = trainer(monitor)
    training.fit(model, loader())
    assert [record.step for record in records] == [step for step in range(1, 9) if step - 1 not in skipped]
    assert [record.loss for record in records] == pytest.approx(model.losses, rel=1e-6)
    training.save_checkpoint(tmp_path / "stopped.ckpt")
    resumed = Monitor()
    trainer(resumed, max_epochs=2).fit(Skips(*range(8)), loader(), ckpt_path=tmp_path / "stopped.ckpt")
    assert (monitor.monitor.steps, resumed.monitor.steps) == (8, 16)
    assert resumed.monitor.min_loss == monitor.monitor.min_loss


def test_one_of_the_accumulated_batches_may_be_skipped():
    model, records = Skips(1), []
    trainer(Monitor(records.append), accumulate_grad_batches=2).fit(model, loader())
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert records[0].loss == pytest.approx(model.losses[0], rel=1e-6)
