"""The experiments in their order: the sweep gives the learning rate, one seed of each duration the best of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from .held_out import read_scores, score_run
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
    Run,
    best_duration_runs,
    duration_runs,
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
from .running import Outcome, Runner
from .statistics import mean_and_error, sign_test


class Experiments:
    """
    Args:
        runner: trains what is not finished.
        seeds: of the baseline and the best duration in the first experiment, and of extrapolation.
    """

    def __init__(self, runner: Runner, seeds: int) -> None:
        self._runner, self._scale, self._seeds = runner, runner.scale, seeds

    def train(self, only: Collection[str]) -> None:
        """All runs of these experiments that are not finished.

        Raises:
            OutOfTime: there are more of them.
            RunFailed: one of them did.
        """
        self._runner.run_all(sweep_runs(self._scale), EXPERIMENTS[SWEEP])
        for experiment in only:
            if experiment == TIME:  # what runs next depends on it
                self._runner.run_all(self._duration_runs(), EXPERIMENTS[TIME])
            self._runner.run_all(self._runs(experiment), EXPERIMENTS[experiment])
        if EXTRAPOLATION in only:
            self._score_all()

    def results(self) -> list[Result]:
        """Of every run that is finished, in this call or one before."""
        sweep = self._finished(SWEEP)
        if len(sweep) < len(sweep_runs(self._scale)):
            return sweep_results(sweep)
        return [
            *sweep_results(sweep),
            *time_results(self._finished(TIME), self._scale.seq_length),
            *stability_results(self._finished(STABILITY), self._peak()),
            *extrapolation_results(self._finished(EXTRAPOLATION)),
            *self._last_words(),
            *speed_results(self._finished(SPEED)),
        ]

    def _finished(self, experiment: str) -> list[Outcome]:
        return self._runner.finished(self._runs(experiment))

    def _peak(self) -> Peak:
        return best_peak(sweep_results(self._finished(SWEEP)))

    def _duration_runs(self) -> list[Run]:
        return duration_runs(self._scale, self._peak())

    def _runs(self, experiment: str) -> list[Run]:
        """As far as is known by now: the best duration only once all are finished."""
        if experiment == SWEEP:
            return sweep_runs(self._scale)
        peak = self._peak()
        if experiment == STABILITY:
            return stability_runs(self._scale, peak)
        if experiment == EXTRAPOLATION:
            return extrapolation_runs(self._scale, peak, self._seeds)
        if experiment == SPEED:
            return speed_runs(self._scale, peak)
        first = self._duration_runs()
        finished = self._runner.finished(first)
        if len(finished) < len(first):
            return first
        best = best_duration(time_results(finished, self._scale.seq_length))
        return [*first, *best_duration_runs(self._scale, peak, best, self._seeds)]

    def _causal(self) -> list[Outcome]:
        return [outcome for outcome in self._finished(EXTRAPOLATION) if outcome.run.objective == CAUSAL]

    def _score_all(self) -> None:
        for outcome in self._causal():
            if read_scores(outcome.folder) is None:
                score_run(outcome.folder, self._runner.out / "tokens", self._scale.last_words, self._scale.device)

    def _last_words(self) -> Iterator[Result]:
        """Of each model, and of warmup against the baseline of its seed."""
        found = {outcome.run: read_scores(outcome.folder) for outcome in self._causal()}
        scores = {run: each for run, each in found.items() if each is not None}
        baselines = {run.seed: own for run, own in scores.items() if run.duration == 0}
        for run, own in scores.items():
            figures: dict[str, float] = {
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
