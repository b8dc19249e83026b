"""TokenCounter in Composer's own trainer: learning rates and an end by the tokens trained on."""

import pytest

pytest.importorskip("composer", reason="needs Composer: make test-composer")

import torch
from composer import Callback, Trainer
from composer.loggers import InMemoryLogger
from torch.utils.data import DataLoader

from seqwarm_kernels.trainers.composer import SeqLengthWarmup, TokenCounter

from ...support.token_rates import PEAK, token_lr
from .training import BATCH_SIZE, LENGTH, batches, counting_rows, tiny_gpt2


class Rates(Callback):
    """The learning rate of each batch, and what it was trained on."""

    def __init__(self):
        self.rates, self.tokens = [], [0]

    def batch_start(self, state, logger):
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])
        mask = state.batch.get("attention_mask", torch.ones_like(state.batch["input_ids"]))
        self.tokens.append(self.tokens[-1] + int(mask.sum()))


def padded(count):
    masks = torch.arange(LENGTH) <= torch.arange(count * BATCH_SIZE)[:, None] % LENGTH
    rows = zip(counting_rows(count * BATCH_SIZE), masks.long(), strict=True)
    examples = [{"input_ids": row, "labels": row, "attention_mask": mask} for row, mask in rows]
    return DataLoader(examples, batch_size=BATCH_SIZE)


def fitted(counter, make, max_duration="8ba", dataloader=None, **options):
    model, rates, logs = tiny_gpt2(), Rates(), InMemoryLogger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK)
    trainer = Trainer(
        model=model,
        train_dataloader=padded(10) if dataloader is None else dataloader,
        max_duration=max_duration,
        algorithms=SeqLengthWarmup(0.5, 8, LENGTH),
        optimizers=optimizer,
        schedulers=make(optimizer, counter.count_tokens),
        step_schedulers_every_batch=True,
        callbacks=[counter, rates],
        loggers=logs,
        device="cpu",
        seed=0,
        progress_bar=False,
        **options,
    )
    trainer.fit()
    return rates, logs, trainer


def test_a_training_ends_by_tokens(tmp_path):
    """The first batches have 4 rows of 8 tokens: 100 batches make a slow ramp."""
    saving = {"save_folder": str(tmp_path), "save_interval": "100ba"}
    counter = TokenCounter(64)
    rates, _, trainer = fitted(counter, token_lr, "100ba", batches(100), **saving)
    assert rates.tokens == [0, 32, 64]
    assert trainer.state.timestamp.batch.value == 2
    assert [path.name for path in tmp_path.glob("ep*.pt")] == ["ep0-ba2-rank0.pt"]
    with pytest.raises(ValueError, match="count_tokens needs a running training"):
        counter.count_tokens()
    path = str(tmp_path / "ep0-ba2-rank0.pt")
    with pytest.raises(ValueError, match="total_tokens must be more than the 64 tokens so far, got 64"):
        fitted(TokenCounter(64), token_lr, "100ba", batches(100), load_path=path)
    later, _, _ = fitted(TokenCounter(65), token_lr, "100ba", batches(100), load_path=path)
    assert later.tokens == [0, 32]


def test_a_counter_that_counts_nothing_raises(tmp_path):
    with pytest.raises(ValueError, match="count_tokens needs a running training with this TokenCounter"):
        TokenCounter().count_tokens()
    for value in (0, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="total_tokens must be"):
            TokenCounter(value)
    saving = {"save_folder": str(tmp_path), "save_interval": "2ba", "save_overwrite": True}
    Trainer(model=tiny_gpt2(), train_dataloader=padded(4), max_duration="2ba", progress_bar=False, **saving).fit()
    with pytest.raises(ValueError, match="the checkpoint was written without TokenCounter"):
        fitted(TokenCounter(), token_lr, load_path=str(tmp_path / "ep0-ba2-rank0.pt"), load_weights_only=False)
