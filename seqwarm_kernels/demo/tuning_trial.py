"""Trials of `tune_schedule` with the demo's small GPT."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from ..schedule.scheduler import SequenceLengthScheduler
from ..tuning import Validation
from ..utils.checks import check_int, check_real
from .records import BASELINE
from .settings import GivenOptions, Settings
from .text import Corpus
from .training import Trainer

#: Durations to try, in per cent of a run. Above 90, the full length would hardly be trained.
_PERCENT = range(15, 91, 5)


@dataclass(frozen=True)
class DemoTrial:
    """Trains by `settings`, in the unit "token", and validates `validations` times up to the end of a trial.

    As in the demo, there is at most one validation for each step at the full length.
    """

    settings: Settings
    corpus: Corpus
    validations: int

    def __post_init__(self) -> None:
        check_int("validations", self.validations, minimum=1)

    def __call__(self, scheduler: SequenceLengthScheduler, end: int) -> Iterator[Validation]:
        evaluations = math.ceil(self.validations * self.settings.total_tokens / end)
        trainer = Trainer(BASELINE, replace(self.settings, evaluations=evaluations), self.corpus)
        trainer.scheduler = scheduler
        with tqdm(disable=True) as bar:
            for record in trainer.train(bar):
                yield Validation(record.tokens, perplexity(record.validation_loss), record.tokens)


def perplexity(loss: float) -> float:
    """Returns exp(loss) for a loss in nats, or inf if it exceeds the largest float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def demo_settings(
    *,
    device: str | None,
    steps: int | None,
    seq_length: int | None,
    seed: int,
    text: list[str] | None,
    learning_rate: float | None,
    batch_size: int | None,
    layers: int | None,
    width: int | None,
) -> Settings:
    """Returns the demo's settings for this machine, replaced by the arguments that are not None.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """
    check_int("--seed", seed)
    paths = None if text is None else tuple(text)
    settings = GivenOptions(device=device, steps=steps, seq_length=seq_length, seed=seed, text=paths).complete()
    given: dict[str, Any] = {
        "peak_learning_rate": learning_rate,
        "batch_size": batch_size,
        "layers": layers,
        "width": width,
    }
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    for name in ("batch_size", "layers", "width"):
        check_int("--" + name.replace("_", "-"), getattr(settings, name), minimum=1)
    if settings.width % settings.heads:
        raise ValueError(f"--width must be a multiple of the {settings.heads} heads, got {settings.width}")
    check_real("--learning-rate", settings.peak_learning_rate)
    if settings.peak_learning_rate <= 0:
        raise ValueError(f"--learning-rate must be positive, got {settings.peak_learning_rate}")
    return settings


def learning_rate_warmup(settings: Settings) -> int:
    """Returns the warmup of the learning rate in tokens."""
    return round(settings.learning_rate_warmup * settings.total_tokens)


def check_trial_within_run(settings: Settings, multiples: float) -> None:
    """Checks that a trial is not longer than the run.

    Raises:
        ValueError: `multiples` times the learning rate's warmup is longer than the run.
    """
    warmup, total = learning_rate_warmup(settings), settings.total_tokens
    if multiples * warmup > total:
        raise ValueError(
            f"--multiples must keep a trial within the run's {total:,} tokens, "
            f"got {multiples:g} times a learning rate's warmup of {warmup:,}"
        )


def default_durations(settings: Settings) -> list[int]:
    """Returns 15 % to 90 % of the run in tokens, without duplicates, which occur in a run of a few tokens."""
    return sorted({settings.total_tokens * percent // 100 for percent in _PERCENT})


def settings_to_compare(trial: DemoTrial) -> dict[str, Any]:
    """Returns everything that determines a trial's numbers: the content of the text, and not its path."""
    settings = trial.settings.to_json()
    for name in ("text", "quick", "packing", "evaluations", "length_warmup"):
        del settings[name]
    return {**settings, "validations": trial.validations, "text_sha256": trial.corpus.fingerprint()}
