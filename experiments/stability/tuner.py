"""Does `tune_schedule` find a duration that trains in the unstable regime, and at what share of the grid's cost?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

import seqwarm_kernels as sw
from seqwarm_kernels.tuning import NoStableSchedule, Trial, Validation, tune_schedule

from .running import Record
from .settings import WARMUP, Setting
from .training import Trainer, train

DURATIONS = tuple(share / 10 for share in range(1, 10))  #: shares of the tokens; the candidates, and the grid
MIN_SEQ_LENGTHS = (64, 128)
VALIDATIONS, WINDOWS = 10, 8  #: of a trial


def run_trial(setting: Setting, scheduler: sw.SequenceLengthScheduler, end: int) -> Iterator[Validation]:
    """Train with `scheduler`, and validate about ten times until `end` tokens."""
    trainer, validated = Trainer(setting, scheduler), 0
    while True:
        if trainer.tokens >= validated * end / VALIDATIONS:
            loss = trainer.validation_loss(WINDOWS)
            yield Validation(trainer.tokens, math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.inf)
            validated += 1
        trainer.step()


def search(setting: Setting) -> Record:
    """One search at this rate with this seed, then a whole run with the schedule that was found."""
    torch.set_num_threads(1)
    setting = replace(setting, kind=WARMUP)
    try:
        found = tune_schedule(
            lambda scheduler, end: run_trial(setting, scheduler, end),
            max_seq_length=setting.seq_length,
            learning_rate_warmup=round(setting.lr_warmup * setting.tokens),
            min_seq_lengths=MIN_SEQ_LENGTHS,
            durations=[round(share * setting.tokens) for share in DURATIONS],
            unit="token",
            seed=setting.seed,
            progress=False,
        )
    except NoStableSchedule as none:
        return {"setting": setting.to_json(), "figures": _spent(setting, none.search.trials) | {"found": False}}
    duration = found.duration / setting.tokens
    record = train(replace(setting, duration=duration, min_seq_length=found.min_seq_length))
    return {**record, "figures": record["figures"] | _spent(setting, found.trials) | {"found": True}}


def _spent(setting: Setting, trials: Sequence[Trial]) -> dict[str, Any]:
    """The cost of a search, and its share of a whole run for each candidate."""
    tokens = sum(trial.cost for trial in trials)
    grid = len(MIN_SEQ_LENGTHS) * len(DURATIONS) * setting.tokens
    return {"trials": len(trials), "search_tokens": tokens, "share_of_grid": round(tokens / grid, 4)}
