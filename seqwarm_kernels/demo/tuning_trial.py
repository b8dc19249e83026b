"""Trials of `tune_schedule` with the demo's small GPT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..schedule.scheduler import SequenceLengthScheduler
from ..tuning import Validation
from .records import WARMUP
from .settings import Settings
from .text import Corpus
from .training import Trainer

#: Durations to try, in per cent of a run. Above 90, the full length would hardly be trained.
_PERCENT = range(15, 91, 5)

_VALIDATIONS = 12  #: in a trial, without the first one, which comes before any training


@dataclass(frozen=True)
class DemoTrial:
    """Trains by `settings`, in the unit "token", with at most one validation for each step at the full length."""

    settings: Settings
    corpus: Corpus

    def __call__(self, scheduler: SequenceLengthScheduler, end: int) -> Iterator[Validation]:
        evaluations = -(-_VALIDATIONS * self.settings.total_tokens // end)
        trainer = Trainer(WARMUP, replace(self.settings, evaluations=evaluations), self.corpus, scheduler)
        for record in trainer.train():
            perplexity = torch.tensor(record.validation_loss, dtype=torch.float64).exp().item()  # may be infinite
            yield Validation(record.tokens, perplexity, record.tokens)

    def search_options(self, multiples: float) -> dict[str, Any]:
        """Options of `tune_schedule`. A whole run is at least as long as a trial.

        Raises:
            ValueError: a trial is longer than the run.
        """
        settings, total = self.settings, self.settings.total_tokens
        warmup = round(settings.learning_rate_warmup * total)
        if multiples * warmup > total:
            raise ValueError(f"multiples must keep a trial within the run's {total:,} tokens, got {multiples:g}")
        return {
            "max_seq_length": settings.seq_length,
            "learning_rate_warmup": warmup,
            "unit": "token",
            "durations": tuple(sorted({total * percent // 100 for percent in _PERCENT})),  # a short run has some twice
            "settings": {**asdict(settings), "text_sha256": self.corpus.fingerprint()},
        }
