"""The experiments in their order. The sweep chooses the learning rate, and seed 0 chooses the best duration."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from .last_words import read_scores, score_run
from .plan import (
    CAUSAL,
    EXPERIMENTS,
    EXTRAPOLATION,
    LAST_WORDS,
    SPEED,
    STABILITY,
    SWEEP,
    TIME,
    Peak,
    RunPlan,
    best_duration_runs,
    duration_runs,
    extrapolated_runs,
    extrapolation_runs,
    speed_runs,
    stability_runs,
    sweep_runs,
)
from .results import (
    Result,
    best_duration,
    best_peak,
    case_of,
    extrapolation_results,
    speed_results,
    stability_results,
    sweep_results,
    time_results,
)
from .running import RunFailed, Runner, RunOutcome
from .statistics import mean_and_error, sign_test


class Experiments:
    """Trains the runs of the experiments, and computes their results.

    Args:
        runner: Trains the runs that are not finished.
        seeds: Number of seeds of the baseline and the best duration in (a), and of (c).
    """

    def __init__(self, runner: Runner, seeds: int) -> None:
        self._runner, self._scale, self._seeds = runner, runner.scale, seeds

    def train(self, only: Collection[str]) -> None:
        """Train all runs of these experiments that are not finished.

        Raises:
            OutOfTime: The time was over before all runs were finished.
            RunFailed: A run failed, or the baseline diverged at every learning rate.
        """
        for experiment in only:
            if experiment != SPEED:
                self._sweep()
            if experiment == TIME:  # they choose the best duration, which further runs need
                self._runner.run_all(self._duration_runs(), EXPERIMENTS[TIME])
            self._runner.run_all(self._runs(experiment), EXPERIMENTS[experiment])
            if experiment == EXTRAPOLATION:
                self._score_all()

    def _sweep(self) -> None:
        self._runner.run_all(sweep_runs(self._scale), EXPERIMENTS[SWEEP])
        if self._peak() is None:
            raise RunFailed("the baseline diverged at each learning rate of the sweep, so (a), (b) and (c) cannot run")

    def results(self) -> list[Result]:
        """The results of all finished runs, also those of earlier calls."""
        peak = self._peak()
        return [
            *sweep_results(self._finished(SWEEP)),
            *time_results(self._finished(TIME), self._scale.seq_length),
            *(stability_results(self._finished(STABILITY), peak) if peak else []),
            *extrapolation_results(self._finished(EXTRAPOLATION)),
            *self._last_words(),
            *speed_results(self._finished(SPEED)),
        ]

    def environments(self) -> list[dict[str, Any]]:
        """The machines that finished runs were trained on, each once. Old runs did not record theirs."""
        outcomes = [outcome for experiment in EXPERIMENTS for outcome in self._finished(experiment)]
        found: list[dict[str, Any]] = []
        for outcome in outcomes:
            if outcome.environment and outcome.environment not in found:
                found.append(outcome.environment)
        return found

    def _finished(self, experiment: str) -> list[RunOutcome]:
        runs, peak = self._runs(experiment), self._peak() if experiment == EXTRAPOLATION else None
        if peak is not None:  # runs stay in the results even if another duration becomes the best
            runs = list(dict.fromkeys([*runs, *extrapolated_runs(self._scale, peak, self._seeds)]))
        return self._runner.finished(runs)

    def _peak(self) -> Peak | None:
        """The best peak of the learning rate. None if the sweep is not finished, or every peak diverged."""
        sweep = sweep_runs(self._scale)
        finished = self._runner.finished(sweep)
        return best_peak(sweep_results(finished)) if len(finished) == len(sweep) else None

    def _duration_runs(self) -> list[RunPlan]:
        peak = self._peak()
        return duration_runs(self._scale, peak) if peak else []

    def _best_duration(self) -> float | None:
        """The best duration. None if not all durations are finished, or none reached the baseline's loss."""
        first = self._duration_runs()
        finished = self._runner.finished(first)
        return best_duration(time_results(finished, self._scale.seq_length)) if len(finished) == len(first) else None

    def _runs(self, experiment: str) -> list[RunPlan]:
        """The runs of an experiment that are known so far: some depend on the results of others."""
        if experiment == SWEEP:
            return sweep_runs(self._scale)
        if experiment == SPEED:
            return speed_runs(self._scale)
        peak = self._peak()
        if peak is None:
            return []
        if experiment == STABILITY:
            return stability_runs(self._scale, peak)
        best = self._best_duration()
        if experiment == EXTRAPOLATION:
            return extrapolation_runs(self._scale, peak, self._seeds, best)
        others = [] if best is None else best_duration_runs(self._scale, peak, best, self._seeds)
        return [*self._duration_runs(), *others]

    def _causal(self) -> list[RunOutcome]:
        return [outcome for outcome in self._finished(EXTRAPOLATION) if outcome.run.objective == CAUSAL]

    def _score_all(self) -> None:
        tokens, check = self._runner.out / "tokens", self._runner.check_time
        for outcome in self._causal():
            if read_scores(outcome.folder) is not None or not (outcome.folder / "model.pt").exists():
                continue  # a run that diverged has no model
            try:
                score_run(outcome.folder, tokens, self._scale.last_words, self._scale.device, check)
            except ValueError as error:  # a text of code has no paragraphs of prose
                print(f"last words are skipped: {error}")
                return

    def _last_words(self) -> Iterator[Result]:
        """Scores of each model, and of warmup compared with the baseline of the same seed."""
        found = {outcome.run: read_scores(outcome.folder) for outcome in self._causal()}
        scores = {run: each for run, each in found.items() if each is not None}
        baselines = {run.seed: own for run, own in scores.items() if run.duration == 0}
        for run, own in scores.items():
            figures: dict[str, float | None] = {
                "items": len(own.right),
                "accuracy": own.accuracy,
                "perplexity": own.perplexity,
            }
            if run.duration > 0 and run.seed in baselines:
                theirs = baselines[run.seed]
                figures["p"] = sign_test(own.right, theirs.right)
                fewer = [a - b for a, b in zip(theirs.nats, own.nats, strict=True)]
                figures["nats_fewer"], figures["nats_fewer_error"] = mean_and_error(fewer)
            yield Result(LAST_WORDS, case_of(run), figures)
