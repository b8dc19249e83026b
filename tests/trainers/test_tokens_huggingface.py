"""Learning rates and an end by tokens in a Hugging Face Trainer: of every step, from the tokens trained on before."""

import json

import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from seqwarm_kernels.trainers.huggingface import SequenceLengthWarmup

from ..support.ranks import leave_group, run_ranks, set_environment
from ..support.tiers import first_fast
from ..support.token_rates import PEAK, SCHEDULERS, token_lr
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


def tokens_before_each_step(rows, lengths, per_step):
    """Tokens of the attention masks: `rows` in order, `per_step` of them in each step, cut to the step's length."""
    tokens = [0]
    for step, length in enumerate(lengths):
        batch = rows[step * per_step : (step + 1) * per_step]
        tokens.append(tokens[-1] + int(sum(row["attention_mask"][:length].sum() for row in batch)))
    return tokens[:-1]


@pytest.mark.parametrize(
    ("kind", "unit", "accumulate"),
    first_fast(
        [
            ("TokenLR", "step", 2),
            ("StepByTokens", "step", 2),
            ("TokenLR", "token", 1),
            ("TokenLR", "sample", 2),
        ]
    ),
)
def test_each_step_has_the_learning_rate_of_its_tokens(tmp_path, kind, unit, accumulate):
    make, rate_at = SCHEDULERS[kind]
    warmup = SequenceLengthWarmup(schedule({"step": 3, "token": 60, "sample": 9}[unit], unit))
    arguments = {"gradient_accumulation_steps": accumulate, "logging_steps": 1}
    training, rates = made(tmp_path, make, warmup, padded_dataset(), **arguments)
    training.train()
    logs = [record for record in training.state.log_history if "loss" in record]
    lengths = [record["seq_length"] for record in logs]
    assert len({*lengths}) > 2
    tokens = tokens_before_each_step(padded_dataset(), lengths, 2 * accumulate)
    torch.testing.assert_close(rates, [rate_at(count) for count in tokens], rtol=1e-12, atol=0)
    assert [record["learning_rate"] for record in logs] == rates
    assert [record["train_tokens"] for record in logs][:-1] == tokens[1:]


@pytest.mark.parametrize("kind", first_fast([*SCHEDULERS]))
def test_a_resumed_training_has_the_same_learning_rates(tmp_path, kind):
    make = SCHEDULERS[kind][0]
    arguments = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    training, rates = made(tmp_path, make, SequenceLengthWarmup(schedule(5)), padded_dataset(), **arguments)
    training.train()
    resumed, later = made(tmp_path / "again", make, SequenceLengthWarmup(schedule(5)), padded_dataset(), **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert later == rates[3:]
    assert len({*later}) > 3


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


def test_a_resumed_training_ends_by_tokens(tmp_path):
    def training(folder, total):
        warmup = SequenceLengthWarmup(schedule(duration=0), total_tokens=total)
        return made(folder, token_lr, warmup, max_steps=7, save_strategy="steps", save_steps=500)[0]

    training(tmp_path, 96).train()
    folder = str(tmp_path / "checkpoint-3")
    longer = training(tmp_path / "again", 97)
    longer.train(resume_from_checkpoint=folder)
    assert longer.state.global_step == 4
    for total in (5, 96):
        with pytest.raises(ValueError, match=f"total_tokens must be more than the 96 tokens .*got {total}"):
            training(tmp_path / "again", total).train(resume_from_checkpoint=folder)


def test_a_count_without_a_training_raises(tmp_path):
    warmup, other = SequenceLengthWarmup(schedule()), SequenceLengthWarmup(schedule())
    with pytest.raises(ValueError, match="count_tokens needs a running training with this SequenceLengthWarmup"):
        warmup.count_tokens()
    training, _ = made(tmp_path, token_lr, warmup)
    training.lr_scheduler = token_lr(training.optimizer, other.count_tokens)
    with pytest.raises(ValueError, match="count_tokens needs a running training with this"):
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


def in_parts(folder, batch_size, **arguments):
    for kind, (make, _) in SCHEDULERS.items():
        warmup = SequenceLengthWarmup(SequenceLengthScheduler(4, 16, duration=3, step_size=4), total_tokens=130)
        arguments |= {"per_device_train_batch_size": batch_size, "num_train_epochs": 9}
        training, rates = made(folder / kind, make, warmup, padded_dataset(), **arguments)
        training.train()
        yield rates, training.state.global_step


def one_of_two(rank, port, folder):
    set_environment(rank, port)
    (folder / f"{rank}.json").write_text(json.dumps([*in_parts(folder, 2, ddp_backend="gloo")]))
    leave_group()


@pytest.mark.slow
def test_two_processes_have_the_learning_rates_of_one(tmp_path):
    """Rows are padded, so the ranks have different numbers of tokens."""
    run_ranks(one_of_two, tmp_path)
    alone = [[rates, steps] for rates, steps in in_parts(tmp_path, 4)]
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == alone
    assert all(len({*rates}) > 2 for rates, _ in alone)
