"""Learning rates and an end by tokens in Lightning's Trainer: of every step, from the tokens trained on before."""

import json
import os

import pytest
import torch

pytest.importorskip("lightning.pytorch")

from seqwarm_kernels.trainers.lightning import SequenceLengthWarmup

from ..support.ranks import leave_group, run_ranks
from ..support.tiers import first_fast
from ..support.token_rates import PEAK, SCHEDULERS, token_lr, token_lr_at
from .test_lightning import InOrder, Model, Records, checkpoints, loader, padded_rows, rows, schedule, trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's hints on workers, loggers and intervals


class ByTokens(Model):
    """Keeps the learning rate of each optimizer step."""

    def __init__(self, make, warmup, manual=False):
        super().__init__()
        self.make, self.warmup, self.rates = make, warmup, []
        self.automatic_optimization = not manual

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=PEAK)
        scheduler = self.make(optimizer, self.warmup.count_tokens)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            self.manual_backward(loss)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()
            self.lr_schedulers().step()
        return loss


def tokens_before_each_batch(lengths):
    tokens = [0]
    for length, batch in zip(lengths, loader(padded_rows()), strict=True):
        tokens.append(tokens[-1] + int(batch["attention_mask"][:, :length].sum()))
    return tokens[:-1]


@pytest.mark.parametrize(
    ("kind", "unit", "accumulate"),
    first_fast(
        [("TokenLR", "step", 2), ("StepByTokens", "step", 1), ("TokenLR", "token", 2), ("TokenLR", "sample", 1)]
    ),
)
def test_each_step_has_the_learning_rate_of_its_tokens(kind, unit, accumulate):
    make, rate_at = SCHEDULERS[kind]
    warmup = SequenceLengthWarmup(schedule({"step": 3, "token": 60, "sample": 9}[unit], unit))
    model, records = ByTokens(make, warmup), Records()
    training = trainer(warmup, accumulate_grad_batches=accumulate, logger=records, log_every_n_steps=3)
    training.fit(model, loader(padded_rows()))
    tokens = tokens_before_each_batch(model.lengths[True])
    torch.testing.assert_close(model.rates, [rate_at(count) for count in tokens[::accumulate]], rtol=1e-12, atol=0)
    assert len({*model.rates}) > 3
    logged = [record["train_tokens"] for record in records.records]
    assert logged == tokens[3 * accumulate :: 3 * accumulate]


def test_a_manual_optimization_may_step_the_scheduler_after_each_batch():
    warmup = SequenceLengthWarmup(schedule(3))
    model = ByTokens(token_lr, warmup, manual=True)
    trainer(warmup).fit(model, loader(padded_rows()))
    tokens = tokens_before_each_batch(model.lengths[True])[1::2]
    torch.testing.assert_close(model.rates, [token_lr_at(count) for count in tokens], rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", first_fast([*SCHEDULERS]))
@pytest.mark.parametrize("unit", first_fast(["step", "token"]))
def test_a_resumed_training_has_the_same_learning_rates(tmp_path, kind, unit):
    def fit(folder, **resumed):
        warmup = SequenceLengthWarmup(schedule({"step": 12, "token": 150}[unit], unit))
        model = ByTokens(SCHEDULERS[kind][0], warmup)
        settings = {"enable_checkpointing": True, "max_epochs": 2, "accumulate_grad_batches": 2}
        training = trainer([warmup, checkpoints(folder)], **settings)
        training.fit(model, loader(padded_rows()), **resumed)
        return model.rates

    rates = fit(tmp_path)
    assert len({*rates[4:]}) > 3
    assert fit(tmp_path / "again", ckpt_path=tmp_path / "epoch=0.ckpt") == rates[4:]


def test_a_training_ends_by_tokens():
    """Rows of 16 tokens, cut to 4, 4, 8, 12, 16: a batch of two more has 8, 16, 32, 56, 88 tokens in all."""
    for total, steps in ((56, 4), (57, 5)):
        warmup = SequenceLengthWarmup(schedule(), total_tokens=total)
        model, records = ByTokens(token_lr, warmup), Records()
        training = trainer(warmup, max_epochs=-1, logger=records, log_every_n_steps=50)
        training.fit(model, loader(), loader(rows(2)))
        assert training.global_step == len(model.rates) == steps
        assert model.lengths[False][-1] == 16  # it validates at the end
        training.fit(ByTokens(token_lr, warmup), loader())  # has ended


def test_a_resumed_training_ends_by_tokens(tmp_path):
    def train(folder, total, **resumed):
        warmup = SequenceLengthWarmup(schedule(duration=0), total_tokens=total)
        training = trainer([warmup, checkpoints(folder)], enable_checkpointing=True, max_epochs=-1)
        training.fit(ByTokens(token_lr, warmup), loader(), **resumed)
        return training.global_step

    assert train(tmp_path, 300) == 10
    path = tmp_path / "epoch=0.ckpt"  # 256 tokens
    assert train(tmp_path / "again", 257, ckpt_path=path) == 9
    with pytest.raises(ValueError, match="total_tokens must be more than the 256 tokens of the checkpoint, got 256"):
        train(tmp_path / "again", 256, ckpt_path=path)


def reports(size, **settings):
    for make, _ in SCHEDULERS.values():
        warmup = SequenceLengthWarmup(schedule(3), total_tokens=130)
        model = ByTokens(make, warmup)
        training = trainer(warmup, use_distributed_sampler=False, max_epochs=-1, **settings)
        training.fit(model, InOrder(size))
        yield [model.rates, training.global_step]


def one_of_two(rank, port, folder):
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (folder / f"{rank}.json").write_text(json.dumps([*reports(2, devices=2, strategy="ddp")]))
    leave_group()


@pytest.mark.slow
def test_two_processes_have_the_learning_rates_of_one(tmp_path):
    """Rows are padded, so the ranks have different numbers of tokens."""
    run_ranks(one_of_two, tmp_path)
    alone = [*reports(4)]
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == alone
    assert all(len({*rates}) > 2 for rates, _ in alone)
