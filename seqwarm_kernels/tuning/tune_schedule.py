"""The paper's low-cost tuning of a schedule."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..schedule.scheduler import Pacing
from ..utils.checks import check_bool
from .configuration import Configuration
from .result import NoStableSchedule, TunedSchedule
from .search import largest_stable
from .trial import RunTrial, Trial, run
from .trial_folder import TrialFolder


def tune_schedule(
    run_trial: RunTrial,
    *,
    max_seq_length: int,
    learning_rate_warmup: int,
    min_seq_lengths: Iterable[int] = (8, 16, 32, 64, 128),
    durations: Iterable[int] | None = None,
    multiples: float = 3,
    max_rise: float = 1.3,
    step_size: int = 8,
    unit: str = "step",
    pacing: str | Pacing = "linear",
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> TunedSchedule:
    """The smallest minimum length and the largest duration that train stably, each tried at the beginning only.

    Minimum lengths are raised, at the shortest duration, until validation perplexity does not fluctuate significantly;
    then the largest duration of which that is true is found by bisection. A trial ends after the first few multiples
    of the learning rate's warmup, or with its first significant fluctuation. If no length is stable at the shortest
    duration, all are tried at longer ones. Bisection takes it that durations, from the first stable one on, are stable
    up to some limit and not beyond; what is returned was tried itself and was stable.

    Source of the method: C. Li, M. Zhang, Y. He, "The Stability-Efficiency Dilemma", NeurIPS 2022, arXiv 2108.06084,
    section 4, and DeepSpeed's tutorial on curriculum learning, section 1.1.

    Args:
        run_trial: called with a new `SequenceLengthScheduler` and a number of units; trains from scratch with that
            schedule for so many units, and yields a `Validation` whenever it has validated on sequences of the FULL
            length: before the first unit, ten times or so on the way, at the end. It steps the scheduler. The first
            validation at the end or past it, however far, is the last that counts. The iterator is closed when the
            trial is decided, so a generator may end late, and may clean up in `finally`.
        max_seq_length: tokens in a sequence in the end, at least 2.
        learning_rate_warmup: units of the learning rate's own warmup, at least 1.
        min_seq_lengths: candidates, from small to large; those not below `max_seq_length` are left out.
        durations: candidates, in units, from small to large; by default 1 to 16 times the length of a trial.
        multiples: a trial takes this many times `learning_rate_warmup`, above 0.
        max_rise: a perplexity above this times the best one before it is a significant fluctuation, as is one that is
            not finite; above 1.
        step_size, unit, pacing: as in `SequenceLengthScheduler`; pacing must not be `discrete`, nor a lambda with
            `folder`, where functions are compared by their names.
        seed: of torch, NumPy and Python's random in every trial, so that none depends on those before it; afterwards
            their streams go on where they were.
        settings: plain JSON values, whatever else decides the numbers: learning rate, batch size, model. Only kept in
            `folder`, and compared.
        folder: for the records of all trials, written after each validation. A search that was stopped goes on: trials
            that are finished are read, not run.
        progress: whether to show a bar for each trial.

    Returns:
        The schedule found, with the trials.

    Raises:
        NoStableSchedule: every trial fluctuated.
        TypeError, ValueError: an argument is wrong, `run_trial` yields something else or ends early, or `folder`
            belongs to another configuration.
    """
    if not callable(run_trial):
        raise TypeError(f"run_trial must be callable, got {type(run_trial).__name__}")
    check_bool("progress", progress)
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"folder must be a path, got {type(folder).__name__}")
    configuration = Configuration.checked(
        max_seq_length=max_seq_length,
        min_seq_lengths=min_seq_lengths,
        durations=durations,
        learning_rate_warmup=learning_rate_warmup,
        multiples=multiples,
        max_rise=max_rise,
        step_size=step_size,
        unit=unit,
        pacing=pacing,
        seed=seed,
        settings=settings,
    )
    records = None if folder is None else TrialFolder.open(Path(folder), configuration)
    trials: list[Trial] = []

    def is_stable(length: int, duration: int) -> bool:
        trial = configuration.trial(configuration.min_seq_lengths[length], configuration.durations[duration])
        trials.append(_finish(trial, len(trials) + 1, run_trial, configuration, records, progress))
        return trials[-1].is_stable

    found = largest_stable(len(configuration.min_seq_lengths), len(configuration.durations), is_stable)
    result = _result(configuration, trials, found)
    if records is not None:
        records.save_result(result.to_json())
    if isinstance(result, NoStableSchedule):
        raise result
    return result


def _finish(
    trial: Trial,
    number: int,
    run_trial: RunTrial,
    configuration: Configuration,
    records: TrialFolder | None,
    progress: bool,
) -> Trial:
    """The trial as it was recorded, if it was finished; else run from its beginning."""
    if records is not None:
        recorded = records.load(trial)
        if recorded.is_finished:
            return recorded
    scheduler = configuration.scheduler(trial.min_seq_length, trial.duration)
    bar = tqdm(
        desc=f"trial {number}: from {trial.min_seq_length} over {trial.duration:,}",
        total=trial.end,
        unit=f" {scheduler.unit}s",
        unit_scale=True,
        disable=not progress,
    )

    def on_validation(trial: Trial) -> None:
        if records is not None:
            records.save(trial)
        bar.set_postfix_str(f"perplexity {trial.validations[-1].perplexity:.4g}", refresh=False)
        bar.update(min(trial.cost, trial.end) - bar.n)

    with bar:
        return run(trial, run_trial, scheduler, configuration.seed, on_validation)


def _result(
    configuration: Configuration, trials: list[Trial], found: tuple[int, int] | None
) -> TunedSchedule | NoStableSchedule:
    if found is None:
        return NoStableSchedule(configuration, trials)
    candidate = configuration.min_seq_lengths[found[0]], configuration.durations[found[1]]
    accepted = next(trial for trial in trials if (trial.min_seq_length, trial.duration) == candidate)
    return TunedSchedule(configuration, tuple(trials), accepted)
