"""TokenLR and StepByTokens: learning rates from the tokens of each step, in loops of one's own and under Accelerate."""

import copy

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import seqwarm_kernels as sw
from seqwarm_kernels.schedule.token_lr import follow_source

from ..support.token_rates import share_at

PEAKS = (0.3, 0.07)
COUNTS = [5, 0, 17, 1, 40, 37, 0, 200, 3]  # of 100 warmup and 300 decay tokens


def made_optimizer(peaks=PEAKS):
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": peak} for peak in peaks]
    return torch.optim.SGD(groups, momentum=0.5)


def token_lr(optimizer, **settings):
    return sw.TokenLR(optimizer, **{"warmup_tokens": 100, "decay_tokens": 300, **settings})


def cosine_lr(optimizer, per_step=16, **settings):
    return sw.StepByTokens(schedulers.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.001), per_step, **settings)


def two(optimizer):
    return [schedulers.ConstantLR(optimizer, 0.5), schedulers.ExponentialLR(optimizer, 0.9)]


OTHERS = {
    "exponential": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    # changes the momentum, too, from the rates that it has set last
    "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=list(PEAKS), total_steps=40),
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "milestones": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 4]),
    "cyclic": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "sequential": lambda optimizer: schedulers.SequentialLR(optimizer, two(optimizer), [3]),
    "chained": lambda optimizer: schedulers.ChainedScheduler(two(optimizer)),
}
MAKERS = {"TokenLR": token_lr, "cosine": cosine_lr}
MAKERS |= {
    name: lambda optimizer, make=make, **settings: sw.StepByTokens(make(optimizer), 16, **settings)
    for name, make in OTHERS.items()
}


def trained(optimizer, schedule, counts):
    """The learning rates of each step, of all groups."""
    rates = []
    for count in counts:
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step(count)
        assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    return rates


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize(
    ("warmup", "decay", "final"), [(100, 300, 0.1), (0, 250.5, 0.0), (63, 63, 0.5), (7, 9999, 0.25), (1, 1.5, 1)]
)
def test_learning_rates_follow_the_tokens(shape, warmup, decay, final):
    optimizer = made_optimizer()
    schedule = sw.TokenLR(optimizer, warmup_tokens=warmup, decay_tokens=decay, final=final, decay=shape)
    rates = trained(optimizer, schedule, COUNTS)
    tokens = np.cumsum([0, *COUNTS])
    expected = [[peak * share_at(count, warmup, decay, final, shape) for peak in PEAKS] for count in tokens[:-1]]
    np.testing.assert_allclose(rates, expected, rtol=1e-12, atol=1e-15)
    assert schedule.tokens == tokens[-1]


def test_the_peak_and_the_end_are_exact():
    optimizer = made_optimizer()
    assert trained(optimizer, token_lr(optimizer), [100, 199, 1, 10**12, 0])[1] == list(PEAKS)
    assert [group["lr"] for group in optimizer.param_groups] == [peak * 0.1 for peak in PEAKS]


def test_a_scheduler_steps_once_for_each_number_of_tokens():
    for per_step in (1, 16, 50):
        optimizer, stepped = made_optimizer(), made_optimizer()
        schedule = cosine_lr(optimizer, per_step)
        plain = schedulers.CosineAnnealingLR(stepped, T_max=20, eta_min=0.001)
        expected = [[group["lr"] for group in stepped.param_groups]]
        stepped.step()
        for _ in range(sum(COUNTS)):
            plain.step()
            expected.append([group["lr"] for group in stepped.param_groups])
        tokens = np.cumsum([0, *COUNTS])[:-1]
        assert trained(optimizer, schedule, COUNTS) == [expected[count // per_step] for count in tokens]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_resumed_training_has_the_same_learning_rates_to_the_bit(make, tmp_path):
    whole = made_optimizer()
    expected = trained(whole, make(whole), COUNTS)
    for stop in range(len(COUNTS)):
        first = made_optimizer()
        schedule = make(first)
        trained(first, schedule, COUNTS[:stop])
        torch.save([first.state_dict(), schedule.state_dict()], tmp_path / "state")
        second = made_optimizer((9.0, 9.0))  # the state has the peaks
        resumed = make(second)
        states = torch.load(tmp_path / "state", weights_only=True)
        second.load_state_dict(states[0])
        resumed.load_state_dict(states[1])
        assert resumed.get_last_lr() == schedule.get_last_lr()
        assert trained(second, resumed, COUNTS[stop:]) == expected[stop:]


def test_a_state_of_another_configuration_raises_and_changes_nothing():
    others = {
        name: token_lr(made_optimizer(), **{name: value})
        for name, value in {"warmup_tokens": 99, "decay_tokens": 301, "final": 0.2, "decay": "linear"}.items()
    }
    for schedule, refused in (
        (token_lr(made_optimizer()), others),
        (cosine_lr(made_optimizer()), {"tokens_per_step": cosine_lr(made_optimizer(), 17)}),
    ):
        before = schedule.state_dict()
        for name, other in refused.items():
            with pytest.raises(ValueError, match=f"another configuration: {name} is"):
                schedule.load_state_dict({**other.state_dict(), "tokens": 7})
        with pytest.raises(ValueError, match="must have the entries"):
            schedule.load_state_dict({"tokens": 7})
        assert schedule.state_dict() == before


def wrong_states(state):
    """States of `SequentialLR([LambdaLR, LambdaLR])` that torch refuses when it has loaded a part of them."""
    first, second = state["_schedulers"]
    yield {**state, "last_epoch": 99, "_schedulers": [first, second, second]}
    yield {**state, "last_epoch": 99, "_schedulers": [{**first, "last_epoch": 99}, {**second, "lr_lambdas": 3}]}


@pytest.mark.filterwarnings("ignore")
def test_a_state_that_the_scheduler_inside_refuses_changes_nothing():
    def made():
        optimizer = made_optimizer()
        parts = [schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)) for _ in range(2)]
        return sw.StepByTokens(schedulers.SequentialLR(optimizer, parts, [3]), 16)

    schedule, other = made(), made()
    for each in (schedule, other):
        each.step(16 * 2)
    for wrong in wrong_states(schedule.state_dict()["scheduler"]):
        saved = {**schedule.state_dict(), "tokens": 7, "scheduler": wrong}
        given = copy.deepcopy(saved)
        with pytest.raises((IndexError, TypeError)):
            schedule.load_state_dict(saved)
        assert saved == given
        assert schedule.state_dict() == other.state_dict()
    for each in (schedule, other):
        each.step(16 * 3)
    assert schedule.get_last_lr() == other.get_last_lr()


@pytest.mark.parametrize("make", [token_lr, cosine_lr])
def test_a_source_is_read_however_often_the_scheduler_steps(make):
    optimizer, read, tokens = made_optimizer(), made_optimizer(), np.zeros(1, np.int64)
    expected = trained(optimizer, make(optimizer), COUNTS)
    schedule = make(read, source=lambda: tokens[0])
    rates = []
    for count in COUNTS:
        rates.append([group["lr"] for group in read.param_groups])
        read.step()
        tokens[0] += count
        for _ in range(3):
            schedule.step()
    assert rates == expected
    assert schedule.tokens == sum(COUNTS)
    assert type(schedule.state_dict()["tokens"]) is int, "torch.load refuses numbers of NumPy"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("starts_at", [0, 60, 150])
def test_at_the_start_of_a_training_rates_follow_the_source(make, starts_at):
    """Of 0 tokens after an earlier training, of as many as a checkpoint has, or of more."""

    def started(counts):
        optimizer, tokens = made_optimizer(), [0]
        schedule = make(optimizer, source=lambda: tokens[0])
        for count in counts:
            tokens[0] = count
            optimizer.step()
            schedule.step()
        tokens[0] = starts_at
        follow_source(schedule)
        rates = []
        for _ in range(4):
            rates.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
            optimizer.step()
            tokens[0] += 20
            schedule.step()
        return rates

    expected = started([])
    for earlier in ([60], [5, 100, 333], [60, 60]):
        assert started(earlier) == expected


def test_rates_without_a_source_stay_at_the_start_of_a_training():
    for schedule in (token_lr(made_optimizer()), cosine_lr(made_optimizer())):
        schedule.step(150)
        before = schedule.get_last_lr()
        follow_source(schedule)
        assert schedule.get_last_lr() == before


@pytest.mark.parametrize("make", [token_lr, cosine_lr])
def test_a_step_needs_a_number_or_a_source(make):
    schedule = make(made_optimizer())
    for count in (None, -1):
        with pytest.raises(ValueError, match="n must be"):
            schedule.step(count)
    assert schedule.tokens == 0


@pytest.mark.parametrize(
    ("settings", "error", "name"),
    [
        ({"warmup_tokens": "1"}, TypeError, "warmup_tokens"),
        ({"decay_tokens": None}, TypeError, "decay_tokens"),
        ({"final": None}, TypeError, "final"),
        ({"warmup_tokens": 0.1}, ValueError, "warmup_tokens"),
        ({"decay_tokens": 99}, ValueError, "decay_tokens"),
        ({"warmup_tokens": 0, "decay_tokens": 0}, ValueError, "decay_tokens"),
        ({"final": 1.5}, ValueError, "final"),
        ({"decay": "exponential"}, ValueError, "decay"),
    ],
)
def test_bad_settings(settings, error, name):
    optimizer = made_optimizer()
    with pytest.raises(error, match=f"^{name} must"):
        token_lr(optimizer, **settings)
    assert [group["lr"] for group in optimizer.param_groups] == list(PEAKS)
    with pytest.raises(ValueError, match=r"^tokens_per_step must"):
        cosine_lr(made_optimizer(), 0)


@pytest.mark.parametrize("make", [token_lr, cosine_lr])
def test_learning_rates_in_tensors_stay_the_same_tensors(make):
    """As optimizers that are captured or compiled need."""
    rate = torch.tensor(0.3, dtype=torch.float64)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=rate, capturable=True, foreach=True)
    plain = made_optimizer([0.3])
    schedule, expected = make(optimizer), make(plain)
    for count in COUNTS:
        for each in (optimizer, plain):
            each.step()
        schedule.step(count)
        expected.step(count)
        assert optimizer.param_groups[0]["lr"] is rate
        torch.testing.assert_close(rate.item(), plain.param_groups[0]["lr"])


@pytest.mark.parametrize("make", [token_lr, cosine_lr])
def test_accelerate_prepares_it(make):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    inner, plain, tokens, counts = made_optimizer(), made_optimizer(), [0], [0, *COUNTS, 0, *COUNTS]
    optimizer, schedule = accelerator.prepare(inner, make(inner, source=lambda: tokens[0]))
    parameter = inner.param_groups[0]["params"][0]
    rates = []
    for count in counts:
        with accelerator.accumulate(torch.nn.Identity()):
            rates.append([group["lr"] for group in inner.param_groups])
            accelerator.backward(parameter.sum())
            optimizer.step()
            tokens[0] += count
            schedule.step()
            optimizer.zero_grad()
    pairs = [first + second for first, second in zip(counts[::2], counts[1::2], strict=True)]
    assert rates[::2] == rates[1::2] == trained(plain, make(plain), pairs)
