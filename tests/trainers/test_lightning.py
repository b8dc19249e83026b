"""What SequenceLengthWarmup promises in a Lightning Trainer alone; test_contract.py has the rest."""

import warnings
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from seqwarm_kernels import SequenceLengthScheduler

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as lightning

from seqwarm_kernels.trainers.lightning import SequenceLengthWarmup

from ..support.lightning import quiet_trainer as trainer
from ..support.token_rates import PEAK, token_lr, token_lr_at

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's hints on workers, loggers and intervals
WORDS, WIDTH, LENGTH, LEARNING_RATE = 11, 8, 16, 0.05


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


class Steps:
    """The loss is computed in training_step, outside of any forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.losses, self.lengths, self.types = [], {True: [], False: []}, set()

    def forward(self, input_ids):
        self.lengths[self.training].append(input_ids.shape[1])
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
    Pair: lambda batch: Pair(*KINDS[list](batch)),
    Tensor: lambda batch: KINDS[list](batch)[0],
}


def test_a_batch_of_any_kind():
    runs = {}
    for kind, collate in KINDS.items():
        runs[kind] = Model()
        trainer(SequenceLengthWarmup(schedule())).fit(runs[kind], loader(collate_fn=collate))
        assert runs[kind].lengths[True] == [4, 4, 8, 12, 16, 16, 16, 16]
        assert runs[kind].types == {kind}
        assert kind is Tensor or runs[kind].losses == runs[dict].losses


def test_a_further_fit_continues_the_schedule():
    model, callback = Model(), SequenceLengthWarmup(schedule())
    training = trainer(callback)
    training.fit(model, loader())
    training.fit_loop.max_epochs = 2
    training.fit(model, loader())
    assert model.lengths[True][8:] == [LENGTH] * 8
    assert callback.state_dict()["train_tokens"] == 2 * sum(model.lengths[True])
    assert "batch_to_device" not in vars(training.strategy)


class ByTokens(Model):
    """Steps its learning rate after each batch, and its optimizer after two."""

    def __init__(self, warmup):
        super().__init__()
        self.warmup, self.rates, self.automatic_optimization = warmup, [], False

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=PEAK)
        return {"optimizer": optimizer, "lr_scheduler": token_lr(optimizer, self.warmup.count_tokens)}

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer = self.optimizers()
        if batch_idx % 2:
            self.rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
        self.lr_schedulers().step()


def test_a_manual_optimization_may_step_the_learning_rate_after_each_batch():
    warmup = SequenceLengthWarmup(schedule())
    model = ByTokens(warmup)
    trainer(warmup).fit(model, loader())
    tokens = torch.tensor([0, *model.lengths[True]]).cumsum(0)[1:-1:2] * 2  # before each second batch of two rows
    assert model.rates == pytest.approx([token_lr_at(count) for count in tokens.tolist()])
    assert len({*model.rates}) > 3


def test_every_optimizer_step_of_a_batch_is_a_step():
    class Manual(Model):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=LEARNING_RATE) for part in (self.embedding, self.head)]

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers():
                optimizer.step()

    model, warmed = Manual(), schedule()
    trainer(SequenceLengthWarmup(warmed)).fit(model, loader())
    assert model.lengths[True] == [4, 8, 16, 16, 16, 16, 16, 16]
    assert warmed.progress == 16


def test_the_trainer_of_pytorch_lightning():
    other = pytest.importorskip("pytorch_lightning")

    class Other(Steps, other.LightningModule):
        pass

    model = Other()
    trainer(SequenceLengthWarmup(schedule()), kind=other.Trainer).fit(model, loader())
    assert model.lengths[True] == [4, 4, 8, 12, 16, 16, 16, 16]


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


def cut_in_training(batch, **options):
    seen = []

    class Module(Model):
        def training_step(self, batch, batch_idx):
            seen.append(batch)
            return self(batch[0]).mean()

    trainer(SequenceLengthWarmup(schedule(duration=9), **options)).fit(Module(), loader([batch], None))
    return seen[0]


def test_the_names_of_a_named_tuple_are_those_of_its_fields():
    """Rows that are padded on the left were cut to their padding, without a warning."""
    tokens = torch.arange(1, 9).repeat(2, 1)
    entries = [(tokens, 0), (torch.ones_like(tokens), 0), (tokens, -100)]
    found = cut_in_training(Padded(*(nn.functional.pad(entry, (8, 0), value=fill) for entry, fill in entries)))
    assert type(found) is Padded
    for cut, (entry, _) in zip(found, entries, strict=True):
        assert cut.equal(entry[:, :4])


def test_entries_without_names_are_not_padded_with_labels():
    """Labels were padded with 0."""
    row = torch.arange(1, 11)[None] % WORDS
    batch = (row, row)
    pad, overlap = ({"mode": "reshape", "remainder": remainder} for remainder in ("pad", "overlap"))
    for options in (pad, {**pad, "pad_values": {"0": 0}}):
        with pytest.raises(ValueError, match="pad_values"):
            cut_in_training(batch, **options)
    tokens, labels = cut_in_training(batch, **pad, pad_values={"0": 0, "1": -100})
    assert tokens[2].tolist() == [9, 10, 0, 0]
    assert labels[2].tolist() == [9, 10, -100, -100]
    with pytest.raises(ValueError, match="remainder"):
        cut_in_training(batch, **overlap)
    assert cut_in_training(batch, **pad, keys=["0"], pad_values={"0": 0})[1].shape == (1, 10)
    assert cut_in_training((row,), **overlap)[0][2].tolist() == [7, 8, 9, 10]
    assert cut_in_training(batch, mode="reshape")[1].shape == (2, 4)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("limits", "progress", "warns_at"),
    [
        ({"max_steps": 3}, 3, 0),
        ({"max_epochs": 1, "limit_train_batches": 2}, 2, 2),
        ({"max_steps": 4, "max_epochs": 1, "limit_train_batches": 2}, 2, 2),
        ({"fast_dev_run": 2}, None, None),
    ],
)
def test_a_training_that_ends_before_the_schedule_warns_as_early_as_that_is_known(limits, progress, warns_at):
    model = Model()
    with warnings.catch_warnings(), nullcontext() if progress is None else pytest.raises(UserWarning) as caught:
        warnings.filterwarnings("error", message="the training ends at")
        trainer(SequenceLengthWarmup(schedule()), **limits).fit(model, loader())
    if progress is not None:
        assert f"grows for 4 steps, and the training takes {progress}" in str(caught.value)
        assert warns_at == len(model.losses)


def test_a_checkpoint_that_is_only_tested_changes_nothing(tmp_path):
    saving = lightning.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer(SequenceLengthWarmup(schedule()), saving, enable_checkpointing=True).fit(Model(), loader())
    other = schedule(9)
    path = tmp_path / "epoch=0.ckpt"
    trainer(SequenceLengthWarmup(other)).test(Model(), loader(), ckpt_path=path, verbose=False)
    assert other.progress == 0


def test_a_batch_of_validation_may_be_anything():
    seen = []

    class Module(Model):
        def validation_step(self, batch, batch_idx):
            seen.append(batch)

    words = DataLoader([1], collate_fn=lambda batch: "words")
    trainer(SequenceLengthWarmup(schedule()), num_sanity_val_steps=0).fit(Module(), loader(), words)
    assert seen == ["words"]
