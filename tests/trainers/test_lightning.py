"""SequenceLengthWarmup in a real Lightning Trainer, against training loops without a Trainer."""

import json
import os
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from seqwarm_kernels import SequenceLengthScheduler, resize_batch

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as lightning

from seqwarm_kernels.trainers.lightning import SequenceLengthWarmup

from ..support.ranks import leave_group, run_ranks

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


class Records(lightning.loggers.logger.Logger):
    """Collects the metrics that loggers get, by step."""

    name, version = "records", 0

    def __init__(self):
        super().__init__()
        self.records = []

    def log_metrics(self, metrics, step=None):
        self.records.append(metrics)

    def log_hyperparams(self, *args, **kwargs):
        pass


def schedule(duration=4, unit="step"):
    return SequenceLengthScheduler(4, LENGTH, duration=duration, step_size=4, unit=unit)


def rows(count=16):
    torch.manual_seed(2)
    return [{"input_ids": row, "labels": row.roll(1)} for row in torch.randint(WORDS, (count, LENGTH))]


def padded_rows(count=16):
    masks = (torch.arange(LENGTH) < torch.arange(1, count + 1)[:, None]).long()
    return [{**row, "attention_mask": mask} for row, mask in zip(rows(count), masks, strict=True)]


def loader(data=None, size=2, **settings):
    return DataLoader(rows() if data is None else data, batch_size=size, **settings)


def trainer(callback, trainer_class=lightning.Trainer, **settings):
    callbacks = callback if isinstance(callback, list) else [callback]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return trainer_class(**{"accelerator": "cpu", "max_epochs": 1, **quiet, "callbacks": callbacks, **settings})


def by_hand(model, schedule, batches, accumulate=1):
    """Trains without a Trainer. The loss of a step is the mean over its batches, as in Lightning."""
    optimizer = model.configure_optimizers()
    model.train()
    for index, batch in enumerate(batches):
        loss = model.training_step(resize_batch(batch, schedule.seq_length), index)
        (loss / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return model


def assert_same_weights(model, expected):
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


KINDS = {
    dict: None,
    list: lambda batch: [torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels")],
    tuple: lambda batch: tuple(KINDS[list](batch)),
    Pair: lambda batch: Pair(*KINDS[list](batch)),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_equals_a_loop_over_resized_batches(kind, accumulate):
    model, callback = Model(), SequenceLengthWarmup(schedule())
    training = trainer(callback, accumulate_grad_batches=accumulate)
    training.fit(model, loader(collate_fn=KINDS[kind]))
    expected = by_hand(Model(), schedule(), loader(), accumulate)
    assert model.losses == expected.losses
    assert model.lengths == expected.lengths
    assert model.types == {kind}
    assert_same_weights(model, expected)
    assert "batch_to_device" not in vars(training.strategy)


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


def test_a_batch_of_one_tensor():
    model = Model()
    trainer(SequenceLengthWarmup(schedule())).fit(model, loader([row["input_ids"] for row in rows()]))
    assert model.lengths[True] == [4, 4, 8, 12, 16, 16, 16, 16]
    assert model.types == {Tensor}


def test_options_reach_resize_batch():
    model = Model()
    trainer(SequenceLengthWarmup(schedule(), mode="flatten", keys=["labels", "input_ids"])).fit(model, loader())
    assert model.lengths[True] == [4, 4, 8, 12, 16, 16, 16, 16]
    expected = Model()
    batches = [resize_batch(batch, 4, mode="flatten") for batch in loader()]
    assert model.losses[0] == expected.training_step(batches[0], 0).item()


def test_validation_keeps_the_full_length():
    model, sets = Model(), [loader(), loader()]
    training = trainer(SequenceLengthWarmup(schedule()), val_check_interval=2, num_sanity_val_steps=1)
    training.fit(model, *sets)
    assert model.lengths == {True: [4, 4, 8, 12, 16, 16, 16, 16], False: [LENGTH] * (1 + 4 * 8)}
    training.validate(model, sets[1], verbose=False)
    assert set(model.lengths[False]) == {LENGTH}


def test_a_data_module_gets_whole_batches():
    class Data(lightning.LightningDataModule):
        def __init__(self):
            super().__init__()
            self.lengths = []

        def train_dataloader(self):
            return loader()

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.lengths.append(batch["input_ids"].shape[1])
            return batch

    model, data = Model(), Data()
    trainer(SequenceLengthWarmup(schedule())).fit(model, data)
    assert data.lengths == [LENGTH] * 8
    assert model.lengths[True] == [4, 4, 8, 12, 16, 16, 16, 16]


@pytest.mark.parametrize(("unit", "logged"), [("step", [16, 56, 120, 184]), ("token", [16, 56, 120, 184])])
def test_lengths_and_tokens_are_logged(unit, logged):
    records = Records()
    warmed = schedule(*{"step": (4, "step"), "token": (40, "token")}[unit])
    trainer(SequenceLengthWarmup(warmed), logger=records, log_every_n_steps=2).fit(Model(), loader())
    assert [record["seq_length"] for record in records.records] == [4, 12, 16, 16]
    assert [record["train_tokens"] for record in records.records] == logged


@pytest.mark.parametrize("unit", ["token", "sample"])
def test_units_count_the_tokens_and_samples_trained_on(unit):
    duration = {"token": 60, "sample": 12}[unit]
    model, counted, callback_tokens = Model(), schedule(duration, unit), 0
    callback = SequenceLengthWarmup(counted)
    trainer(callback, accumulate_grad_batches=2).fit(model, loader(padded_rows()))
    by_count, lengths = schedule(duration), []
    batches = list(loader(padded_rows()))
    for pair in zip(batches[::2], batches[1::2], strict=True):
        length = by_count.seq_length
        kept = sum(int(batch["attention_mask"][:, :length].sum()) for batch in pair)
        by_count.step(kept if unit == "token" else 4)
        lengths += [length, length]
        callback_tokens += kept
    assert model.lengths[True] == lengths
    assert len(set(lengths)) > 2
    assert counted.progress == by_count.progress
    assert callback.state_dict()["train_tokens"] == callback_tokens


def checkpoints(folder, **settings):
    return lightning.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, **settings)


@pytest.mark.parametrize("unit", ["step", "token"])
def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path, unit):
    def fit(warmed, **resumed):
        model, callback = Model(), SequenceLengthWarmup(warmed)
        training = trainer([callback, checkpoints(tmp_path)], enable_checkpointing=True, max_epochs=2)
        training.fit(model, loader(padded_rows()), **resumed)
        return model, callback.state_dict()

    def of_unit():
        return schedule({"step": 12, "token": 150}[unit], unit)

    uninterrupted, state = fit(of_unit())
    fresh = of_unit()
    resumed, state_again = fit(fresh, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert 4 < uninterrupted.lengths[True][8] < LENGTH
    assert resumed.lengths[True] == uninterrupted.lengths[True][8:]
    assert resumed.losses == uninterrupted.losses[8:]
    assert_same_weights(resumed, uninterrupted)
    assert state_again == state
    trained = zip(uninterrupted.lengths[True], [*loader(padded_rows())] * 2, strict=True)
    assert state["train_tokens"] == sum(int(batch["attention_mask"][:, :length].sum()) for length, batch in trained)
    assert fresh.progress == {"step": 16, "token": state["train_tokens"]}[unit]


def test_an_interrupted_training_removes_its_hooks(tmp_path):
    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                raise ArithmeticError

    callback = SequenceLengthWarmup(schedule())
    interrupted = trainer([callback, Stop()])
    with pytest.raises(ArithmeticError):
        interrupted.fit(Model(), loader())
    assert "batch_to_device" not in vars(interrupted.strategy)
    model, again = Model(), trainer(callback)
    again.fit(model, loader())
    assert model.lengths[True] == [4, 4, 8, 12, 16, 16, 16, 16]
    again.fit_loop.max_epochs = 2
    again.fit(model, loader())
    assert model.lengths[True][8:] == [LENGTH] * 8
    assert callback.state_dict()["train_tokens"] == 2 * sum(model.lengths[True])


class InOrder(lightning.LightningDataModule):
    """Keeps the order of the rows, which Lightning's sampler for several processes would shuffle."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def train_dataloader(self):
        ranks = {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
        return loader(padded_rows(), self.size, sampler=DistributedSampler(padded_rows(), **ranks, shuffle=False))


def reports(size, **settings):
    """Trains on padded rows, of which ranks get different numbers of tokens."""
    for unit, duration in (("token", 60), ("step", 3)):
        model, callback = Model(), SequenceLengthWarmup(schedule(duration, unit))
        trainer(callback, use_distributed_sampler=False, **settings).fit(model, InOrder(size))
        yield [model.losses, model.lengths[True], callback.state_dict()]


def one_of_two(rank, port, folder):
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (folder / f"{rank}.json").write_text(json.dumps([*reports(2, devices=2, strategy="ddp")]))
    leave_group()


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    run_ranks(one_of_two, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for own, other, (losses, *alone) in zip(first, second, reports(4), strict=True):
        assert own[1:] == other[1:] == alone
        assert len(set(alone[0])) > 2
        torch.testing.assert_close(torch.tensor([own[0], other[0]]).mean(0), torch.tensor(losses))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("unit", "duration", "limits", "progress"),
    [
        ("step", 4, {"max_steps": 3}, 3),
        ("step", 4, {"max_epochs": 1, "limit_train_batches": 2}, 2),
        ("token", 4 * LENGTH, {"max_steps": 2}, 2 * 2 * 4),
        ("step", 4, {"max_steps": 4}, None),
        ("step", 4, {"fast_dev_run": 2}, None),
        ("step", 4, {"max_epochs": 1, "limit_train_batches": 4}, None),
    ],
)
def test_a_training_that_ends_before_the_schedule_warns_once(unit, duration, limits, progress):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(SequenceLengthWarmup(schedule(duration, unit)), **limits).fit(Model(), loader())
    texts = [str(each.message) for each in caught if "the training ended at" in str(each.message)]
    assert len(texts) == (progress is not None)
    assert all(f"grows for {duration} {unit}s, and the training took {progress}" in text for text in texts)


def test_the_trainer_of_pytorch_lightning():
    other = pytest.importorskip("pytorch_lightning")

    class Other(Steps, other.LightningModule):
        pass

    model = Other()
    trainer(SequenceLengthWarmup(schedule()), other.Trainer).fit(model, loader())
    assert model.lengths[True] == [4, 4, 8, 12, 16, 16, 16, 16]


def test_a_checkpoint_of_another_configuration_raises(tmp_path):
    def train(*callbacks, folder=tmp_path, **resumed):
        training = trainer([*callbacks, checkpoints(folder)], enable_checkpointing=True, max_epochs=2)
        training.fit(Model(), loader(), **resumed)
        return training

    training = train(SequenceLengthWarmup(schedule()))
    train(folder=tmp_path / "without")
    with pytest.raises(ValueError, match="duration is 4 in the state, 9 here"):
        train(SequenceLengthWarmup(schedule(9)), ckpt_path=tmp_path / "epoch=0.ckpt")
    with pytest.raises(ValueError, match="must have a state of SequenceLengthWarmup, got none"):
        train(SequenceLengthWarmup(schedule()), ckpt_path=tmp_path / "without" / "epoch=0.ckpt")
    before = schedule(9)
    tester = trainer(SequenceLengthWarmup(before))
    tester.test(Model(), loader(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    assert before.progress == 0
    assert training.current_epoch == 2


def test_bad_input_raises():
    class Iterating(Model):
        def training_step(self, dataloader_iter):
            pass

    with pytest.raises(TypeError, match="unexpected keyword argument 'sequence_dim'"):
        trainer(SequenceLengthWarmup(schedule(), sequence_dim=1)).fit(Model(), loader())
    with pytest.raises(TypeError, match="training_step must take a batch, got dataloader_iter"):
        trainer(SequenceLengthWarmup(schedule())).fit(Iterating(), loader())
    with pytest.raises(TypeError, match=r"a training batch must be a tensor, or a mapping, .* got str"):
        trainer(SequenceLengthWarmup(schedule())).fit(Model(), loader(collate_fn=lambda batch: "words"))


class Padded(NamedTuple):
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


def test_the_names_of_a_named_tuple_are_those_of_its_fields():
    """Rows that are padded on the left were cut to their padding, without a warning."""
    seen = []

    class Module(Model):
        def training_step(self, batch, batch_idx):
            seen.append(batch)
            return self(batch.input_ids).mean()

    tokens = torch.arange(1, 9).repeat(2, 1)
    mask = torch.ones_like(tokens)
    left = Padded(
        *(nn.functional.pad(entry, (8, 0), value=fill) for entry, fill in ((tokens, 0), (mask, 0), (tokens, -100)))
    )
    trainer(SequenceLengthWarmup(schedule(duration=9))).fit(Module(), loader([left], None))
    assert type(seen[0]) is Padded
    for found, expected in zip(seen[0], (tokens, mask, tokens), strict=True):
        assert found.equal(expected[:, :4])


def cut_in_training(batch, **options):
    seen = []

    class Module(Model):
        def training_step(self, batch, batch_idx):
            seen.append(batch)
            return self(batch[0]).mean()

    trainer(SequenceLengthWarmup(schedule(duration=9), mode="reshape", **options)).fit(Module(), loader([batch], None))
    return seen[0]


def test_entries_without_names_are_not_padded_with_labels():
    """Labels were padded with 0."""
    row = torch.arange(1, 11)[None] % WORDS
    batch = (row, row)
    for options in ({}, {"pad_values": {"0": 0}}):
        with pytest.raises(ValueError, match=r"pad_values must have a value for the unnamed tensor '[01]'"):
            cut_in_training(batch, remainder="pad", **options)
    tokens, labels = cut_in_training(batch, remainder="pad", pad_values={"0": 0, "1": -100})
    assert tokens[2].tolist() == [9, 10, 0, 0]
    assert labels[2].tolist() == [9, 10, -100, -100]
    with pytest.raises(ValueError, match="remainder must be 'drop' or 'pad' for unnamed"):
        cut_in_training(batch, remainder="overlap")
    assert cut_in_training(batch, remainder="pad", keys=["0"], pad_values={"0": 0})[1].shape == (1, 10)
    assert cut_in_training((row,), remainder="overlap")[0][2].tolist() == [7, 8, 9, 10]
    assert cut_in_training(batch)[1].shape == (2, 4)
