"""An end by tokens, and counts between steps, in a Hugging Face Trainer."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from seqwarm_kernels.trainers.huggingface import SequenceLengthWarmup

from ..support.token_rates import PEAK, token_lr
from .test_huggingface import model, padded_dataset, schedule, trainer


class Rates(transformers.TrainerCallback):
    """The learning rate of each optimizer step."""

    def __init__(self):
        self.rates = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append(optimizer.param_groups[0]["lr"])


def made(folder, make, warmup, data=None, **arguments):
    """A Trainer with learning rates by tokens, and what they are."""
    warmed, rates = model(), Rates()
    optimizer = torch.optim.AdamW(warmed.parameters(), lr=PEAK)
    training = trainer(folder, warmed, [rates, warmup], data, **arguments)
    training.optimizer, training.lr_scheduler = optimizer, make(optimizer, warmup.count_tokens)
    return training, rates.rates


def test_a_training_ends_by_tokens_with_an_evaluation_and_a_checkpoint(tmp_path):
    """Rows of 16 tokens, cut to 4, 4, 8, 12, 16: a batch of two more has 8, 16, 32, 56, 88 tokens in all."""
    for total, steps in ((56, 4), (57, 5)):
        warmup = SequenceLengthWarmup(schedule(), total_tokens=total)
        arguments = {"max_steps": 1000, "save_strategy": "steps", "save_steps": 500, "eval_strategy": "steps"}
        training, rates = made(tmp_path / str(total), token_lr, warmup, eval_steps=500, **arguments)
        training.train()
        assert training.state.global_step == len(rates) == steps
        assert [path.name for path in (tmp_path / str(total)).glob("checkpoint-*")] == [f"checkpoint-{steps}"]
        assert sum("eval_loss" in record for record in training.state.log_history) == 1


def test_an_end_by_tokens_evaluates_and_saves_only_by_steps(tmp_path):
    for delay in (3, 4):
        arguments = {"save_strategy": "epoch", "eval_strategy": "steps", "eval_delay": delay, "eval_steps": 500}
        training, rates = made(tmp_path, token_lr, SequenceLengthWarmup(schedule(), total_tokens=25), **arguments)
        training.train()
        assert len(rates) == 3
        assert any("eval_loss" in record for record in training.state.log_history) == (delay == 3)


def test_a_count_without_a_training_raises(tmp_path):
    warmup, other = SequenceLengthWarmup(schedule()), SequenceLengthWarmup(schedule())
    with pytest.raises(
        ValueError, match="count_tokens needs a SequenceLengthWarmup that counts the tokens of a running"
    ):
        warmup.count_tokens()
    training, _ = made(tmp_path, token_lr, warmup)
    training.lr_scheduler = token_lr(training.optimizer, other.count_tokens)
    with pytest.raises(ValueError, match="pass the same object to the trainer"):
        training.train()


def test_a_count_between_steps_changes_nothing(tmp_path):
    class Count(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            self.counts.append(warmup.count_tokens())

        on_step_begin = on_substep_end = on_step_end
        counts = []  # noqa: RUF012

    data, accumulate = padded_dataset(), {"gradient_accumulation_steps": 2}
    uncounted = SequenceLengthWarmup(schedule(60, "token"))
    expected, expected_rates = made(tmp_path, token_lr, uncounted, data, **accumulate)
    expected.train()
    warmup = SequenceLengthWarmup(schedule(60, "token"))
    training, rates = made(tmp_path, token_lr, warmup, data, **accumulate)
    training.add_callback(Count)
    training.train()
    assert rates == expected_rates
    for name in ("seq_length", "train_tokens"):
        assert [record.get(name) for record in training.state.log_history] == [
            record.get(name) for record in expected.state.log_history
        ]
    assert Count.counts[2::3] == [record["train_tokens"] for record in training.state.log_history if "loss" in record]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1"])
def test_a_total_is_a_number_of_tokens(value):
    with pytest.raises((TypeError, ValueError), match="total_tokens must be"):
        SequenceLengthWarmup(schedule(), total_tokens=value)
