"""tune_schedule: low-cost tuning of a schedule in short trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..schedule.pacing import Pacing
from ..utils.progress import standard_error
from ..utils.run_folder import RunFolder
from .configuration import SearchConfiguration
from .result import NoStableSchedule, Search, TunedSchedule
from .search import largest_stable
from .trial import RunTrial, Trial, run

RESULT = "result.json"


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
    """Find the smallest minimum length and the largest duration that train stably, in short trials.

    First, the minimum length is raised, at the shortest duration, until validation perplexity does not fluctuate
    significantly. If no length is stable at the shortest duration, all lengths are tried at longer durations. Then the
    largest stable duration for this length is found by bisection. A trial ends after the first few multiples of the
    learning rate's warmup, or at its first significant fluctuation. Bisection assumes that durations, from the first
    stable one on, are stable up to some limit and unstable above it. The schedule that is returned was tried itself,
    and was stable.

    Source of the method: C. Li, M. Zhang, Y. He, "The Stability-Efficiency Dilemma", NeurIPS 2022, arXiv 2108.06084,
    section 4, and DeepSpeed's tutorial on curriculum learning, section 1.1.

    Args:
        run_trial: called with a new `SequenceLengthScheduler` and a number of units. It trains from scratch with this
            scheduler for this number of units, and steps the scheduler. It yields a `Validation` each time it validates
            on sequences of the FULL length: before the first unit, about ten times during the trial, and at the end.
            The first validation at or after the end is the last one that counts. The iterator is closed when the
            outcome of the trial is known, so a generator may continue past the end, and may clean up in `finally`.
        max_seq_length: full number of tokens in a sequence, at least 2.
        learning_rate_warmup: number of units of the learning rate's own warmup, at least 1.
        min_seq_lengths: candidates, in increasing order. Candidates that are not below `max_seq_length` are left out.
        durations: candidates, in units and increasing order. The default is 1 to 16 times the length of a trial.
        multiples: length of a trial, as a multiple of `learning_rate_warmup`; above 0.
        max_rise: a perplexity above this times the best earlier one is a significant fluctuation, and so is a
            perplexity that is not finite; above 1.
        step_size, unit, pacing: as in `SequenceLengthScheduler`. `pacing` must not be `discrete`. With `folder` it must
            not be a lambda, because a folder compares functions by name.
        seed: seed of torch, NumPy and Python's random in every trial, so that no trial depends on earlier ones.
            Afterwards their random streams are restored.
        settings: plain JSON values that affect the numbers of a trial as well, such as learning rate, batch size and
            model. They are only saved in `folder`, and compared when a search resumes.
        folder: folder for the records of all trials, each written when its outcome is known. An interrupted search
            resumes: finished trials are read instead of run.
        progress: whether to show a progress bar for each trial.

    Returns:
        The schedule found, with the trials.

    Raises:
        NoStableSchedule: every trial fluctuated.
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, `run_trial` ends early or yields an invalid Validation, or `folder` has
            trials of another configuration.
    """
    configuration = SearchConfiguration(
        max_seq_length=max_seq_length,
        min_seq_lengths=tuple(min_seq_lengths),
        durations=() if durations is None else tuple(durations),
        learning_rate_warmup=learning_rate_warmup,
        multiples=multiples,
        max_rise=max_rise,
        step_size=step_size,
        unit=unit,
        pacing=pacing,
        seed=seed,
        settings=settings or {},
    )
    return run_search(configuration, run_trial, open_records(folder, configuration), progress)


def open_records(folder: str | Path | None, configuration: SearchConfiguration) -> RunFolder | None:
    """The folder of a new search, or of an earlier one to resume.

    Raises:
        ValueError: the folder has trials of another configuration or other files, or the pacing has no name.
    """
    if folder is None:
        return None
    values = configuration.flat()
    if values["pacing"].endswith("<lambda>"):  # all lambdas would compare equal
        raise ValueError("pacing must be a named function if folder is given, got a lambda")
    return RunFolder.open(Path(folder), values)


def run_search(
    configuration: SearchConfiguration, run_trial: RunTrial, records: RunFolder | None, progress: bool
) -> TunedSchedule:
    """As `tune_schedule`, which documents the errors."""
    trials: dict[tuple[int, int], Trial] = {}

    def is_stable(length: int, duration: int) -> bool:
        trial = configuration.trial(configuration.min_seq_lengths[length], configuration.durations[duration])
        trials[length, duration] = _finish(trial, len(trials) + 1, run_trial, configuration, records, progress)
        return trials[length, duration].is_stable

    found = largest_stable(len(configuration.min_seq_lengths), len(configuration.durations), is_stable)
    parts = configuration, tuple(trials.values())
    result = Search(*parts, None) if found is None else TunedSchedule(*parts, trials[found])
    if records is not None:
        records.write_json(RESULT, result.to_json())
    if not isinstance(result, TunedSchedule):
        raise NoStableSchedule(result)
    return result


def _finish(
    trial: Trial,
    number: int,
    run_trial: RunTrial,
    configuration: SearchConfiguration,
    records: RunFolder | None,
    progress: bool,
) -> Trial:
    """The recorded trial, or the trial after a run from the beginning."""
    name = f"trial_min{trial.min_seq_length}_duration{trial.duration}.json"
    if records is not None and (records.path / name).exists():
        entries = records.read_json(name)
        try:
            return trial.replayed(entries["validations"])
        except (KeyError, TypeError, ValueError) as error:
            problem = f"{records.path / name} cannot be read: {error!r}; delete it to run the trial again"
            raise ValueError(problem) from error
    scheduler = configuration.scheduler(trial.min_seq_length, trial.duration)
    with tqdm(
        desc=f"trial {number}: {trial.label}",
        total=trial.end,
        unit=f" {scheduler.unit}s",
        unit_scale=True,
        disable=not progress,
        file=standard_error(),
    ) as bar:

        def on_validation(trial: Trial) -> None:
            bar.set_postfix_str(f"perplexity {trial.validations[-1].perplexity:.4g}", refresh=False)
            bar.update(min(trial.cost, trial.end) - bar.n)

        trial = run(trial, run_trial, scheduler, configuration.seed, on_validation)
    if records is not None:
        records.write_json(name, trial.to_json())
    return trial
