"""What the callbacks promise in a Lightning Trainer alone; test_contract.py has the rest."""

import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from seqwarm_kernels import SequenceLengthScheduler

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as lightning

from seqwarm_kernels.trainers.lightning import Monitor, SequenceLengthWarmup

from ..support.lightning import LossModule
from ..support.lightning import quiet_trainer as trainer
from .contract.cases import Case

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's hints on workers, loggers and intervals
WORDS, WIDTH, LENGTH, LEARNING_RATE = 11, 8, 16, 0.05


class Steps:
    """The loss is computed in training_step, outside of any forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.losses, self.lengths, self.types = [], [], set()

    def forward(self, input_ids):
        if self.training:
            self.lengths.append(input_ids.shape[1])
        return self.head(self.embedding(input_ids))

    def loss(self, batch):
        if isinstance(batch, dict):
            inputs, targets = batch["input_ids"], batch["labels"]
        else:
            inputs, targets = (batch, batch) if isinstance(batch, Tensor) else batch
        return nn.functional.cross_entropy(self(inputs)[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.types.add(type(batch))
        return loss

    def validation_step(self, batch, batch_idx):
        self.loss(batch)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)


class Model(Steps, lightning.LightningModule):
    pass


def schedule(duration=4, unit="step"):
    return SequenceLengthScheduler(4, LENGTH, duration=duration, step_size=4, unit=unit)


def rows(count=16):
    torch.manual_seed(2)
    return [{"input_ids": row, "labels": row.roll(1)} for row in torch.randint(WORDS, (count, LENGTH))]


def loader(data=None, size=2, **settings):
    return DataLoader(rows() if data is None else data, batch_size=size, **settings)


KINDS = {
    dict: None,
    list: lambda batch: [torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels")],
    tuple: lambda batch: tuple(KINDS[list](batch)),
    Tensor: lambda batch: KINDS[list](batch)[0],
}


def test_a_batch_of_any_kind():
    runs = {}
    for kind, collate in KINDS.items():
        runs[kind] = Model()
        trainer(SequenceLengthWarmup(schedule())).fit(runs[kind], loader(collate_fn=collate))
        assert runs[kind].lengths == [4, 4, 8, 12, 16, 16, 16, 16]
        assert runs[kind].types == {kind}
        assert kind is Tensor or runs[kind].losses == runs[dict].losses


def test_a_further_fit_continues_the_schedule_and_the_records():
    model, callback, records = Model(), SequenceLengthWarmup(schedule()), []
    training = trainer(callback, Monitor(records.append))
    training.fit(model, loader())
    training.fit_loop.max_epochs = 2
    training.fit(model, loader())
    assert model.lengths[8:] == [LENGTH] * 8
    assert callback.state_dict()["train_tokens"] == 2 * sum(model.lengths)
    assert "batch_to_device" not in vars(training.strategy)
    assert [record.step for record in records] == list(range(1, 17))
    assert records[8].loss_ratio != 1.0


class TwoOptimizers(Model):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=LEARNING_RATE) for part in (self.embedding, self.head)]

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()


def test_every_optimizer_step_of_a_batch_is_a_step():
    model, warmed = TwoOptimizers(), schedule()
    trainer(SequenceLengthWarmup(warmed)).fit(model, loader())
    assert model.lengths == [4, 8, 16, 16, 16, 16, 16, 16]
    assert warmed.progress == 16
    with pytest.raises(ValueError, match="optimizer"):
        trainer(Monitor()).fit(model, loader())


def test_the_trainer_of_pytorch_lightning():
    other = pytest.importorskip("pytorch_lightning")

    class Other(Steps, other.LightningModule):
        pass

    model = Other()
    trainer(SequenceLengthWarmup(schedule()), kind=other.Trainer).fit(model, loader())
    assert model.lengths == [4, 4, 8, 12, 16, 16, 16, 16]


def test_bad_input_raises():
    class Iterating(Model):
        def training_step(self, dataloader_iter):
            pass

    with pytest.raises(TypeError, match="sequence_dim"):
        trainer(SequenceLengthWarmup(schedule(), sequence_dim=1)).fit(Model(), loader())
    with pytest.raises(TypeError, match="dataloader_iter"):
        trainer(SequenceLengthWarmup(schedule())).fit(Iterating(), loader())
    with pytest.raises(TypeError, match="batch"):
        trainer(SequenceLengthWarmup(schedule())).fit(Model(), loader(collate_fn=lambda batch: "words"))


class Padded(NamedTuple):
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


def test_the_names_of_a_named_tuple_are_those_of_its_fields():
    """Rows that are padded on the left are cut from their first token on, if the mask is known by its name."""
    seen = []

    class Module(Model):
        def training_step(self, batch, batch_idx):
            seen.append(batch)
            return self(batch[0]).mean()

    tokens = torch.arange(1, 9).repeat(2, 1)
    entries = [(tokens, 0), (torch.ones_like(tokens), 0), (tokens, -100)]
    batch = Padded(*(nn.functional.pad(entry, (8, 0), value=fill) for entry, fill in entries))
    trainer(SequenceLengthWarmup(schedule())).fit(Module(), loader([batch], None))
    [found] = seen
    assert type(found) is Padded
    for cut, (entry, _) in zip(found, entries, strict=True):
        assert cut.equal(entry[:, :4])


def test_a_trial_run_does_not_warn_that_it_is_too_short():
    warnings.filterwarnings("error", message="the training ends at")  # until the end of the test
    trainer(SequenceLengthWarmup(schedule()), fast_dev_run=2).fit(Model(), loader())


def test_a_checkpoint_that_is_only_tested_changes_nothing(tmp_path):
    training = trainer(SequenceLengthWarmup(schedule()), Monitor())
    training.fit(Model(), loader())
    training.save_checkpoint(tmp_path / "end.ckpt")
    other, monitor = schedule(9), Monitor()
    fresh = trainer(SequenceLengthWarmup(other), monitor)
    fresh.test(Model(), loader(), ckpt_path=tmp_path / "end.ckpt", verbose=False)
    assert other.progress == 0
    fresh.fit(Model(), loader())
    assert (other.progress, monitor.monitor.steps) == (8, 8)


def test_a_batch_of_validation_may_be_anything():
    seen = []

    class Module(Model):
        def validation_step(self, batch, batch_idx):
            seen.append(batch)

    words = DataLoader([1], collate_fn=lambda batch: "words")
    trainer(SequenceLengthWarmup(schedule()), num_sanity_val_steps=0).fit(Module(), loader(), words)
    assert seen == ["words"]


class PassesTwo(LossModule):
    def training_step(self, batch, batch_idx):
        return super().training_step({name: batch[name] for name in ("input_ids", "labels")}, batch_idx)


@pytest.mark.parametrize(
    ("kind", "collate", "error", "name"),
    [(PassesTwo, None, ValueError, "position_ids"), (LossModule, KINDS[tuple], TypeError, "mapping")],
)
def test_segments_must_reach_the_model(kind, collate, error, name):
    module = kind(Case(network="llama-sdpa").model(), torch.optim.SGD, lr=0.0)
    with pytest.raises(error, match=name):
        trainer(SequenceLengthWarmup(schedule(), mode="segments")).fit(module, loader(collate_fn=collate))
    assert not module.model.network._forward_pre_hooks


class Skips(Model):
    """Returns None for the batches of these indices."""

    def __init__(self, *skipped):
        super().__init__()
        self.skipped = skipped

    def training_step(self, batch, batch_idx):
        return None if batch_idx in self.skipped else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("skipped", [(2, 3), range(8)])
def test_a_step_without_a_batch_has_no_record_and_is_counted(tmp_path, skipped):
    model, records = Skips(*skipped), []
    monitor = Monitor(records.append, read_every=3)
    training = trainer(monitor)
    training.fit(model, loader())
    assert [record.step for record in records] == [step for step in range(1, 9) if step - 1 not in skipped]
    assert [record.loss for record in records] == pytest.approx(model.losses, rel=1e-6)
    assert monitor.figures().get("monitor/step") == (records[-1].step if records else None)
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
