"""The experiments in their order: the sweep gives the learning rate, one seed of each duration the best of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

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
from .running import Outcome, RunFailed, Runner
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
        for experiment in only:
            if experiment != SPEED:
                self._sweep()
            if experiment == TIME:  # what runs next depends on it
                self._runner.run_all(self._duration_runs(), EXPERIMENTS[TIME])
            self._runner.run_all(self._runs(experiment), EXPERIMENTS[experiment])
            if experiment == EXTRAPOLATION:
                self._score_all()

    def _sweep(self) -> None:
        self._runner.run_all(sweep_runs(self._scale), EXPERIMENTS[SWEEP])
        if self._peak() is None:
            raise RunFailed("the baseline diverged at each learning rate of the sweep: (a), (b) and (c) have none")

    def results(self) -> list[Result]:
        """Of every run that is finished, in this call or one before."""
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
        """The machines that finished runs were trained on, each once; runs from before this was kept have none."""
        outcomes = [outcome for experiment in EXPERIMENTS for outcome in self._finished(experiment)]
        found: list[dict[str, Any]] = []
        for outcome in outcomes:
            if outcome.environment and outcome.environment not in found:
                found.append(outcome.environment)
        return found

    def _finished(self, experiment: str) -> list[Outcome]:
        runs, peak = self._runs(experiment), self._peak() if experiment == EXTRAPOLATION else None
        if peak is not None:  # what has been looked at once stays, whichever duration is the best in the end
            runs = list(dict.fromkeys([*runs, *extrapolated_runs(self._scale, peak, self._seeds)]))
        return self._runner.finished(runs)

    def _peak(self) -> Peak | None:
        """None as long as the sweep is not finished, too."""
        sweep = sweep_runs(self._scale)
        finished = self._runner.finished(sweep)
        return best_peak(sweep_results(finished)) if len(finished) == len(sweep) else None

    def _duration_runs(self) -> list[Run]:
        peak = self._peak()
        return duration_runs(self._scale, peak) if peak else []

    def _best_duration(self) -> float | None:
        """None as long as not all are finished, too."""
        first = self._duration_runs()
        finished = self._runner.finished(first)
        return best_duration(time_results(finished, self._scale.seq_length)) if len(finished) == len(first) else None

    def _runs(self, experiment: str) -> list[Run]:
        """As far as is known by now."""
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

    def _causal(self) -> list[Outcome]:
        return [outcome for outcome in self._finished(EXTRAPOLATION) if outcome.run.objective == CAUSAL]

    def _score_all(self) -> None:
        tokens, check = self._runner.out / "tokens", self._runner.check_time
        for outcome in self._causal():
            if read_scores(outcome.folder) is not None or not (outcome.folder / "model.pt").exists():
                continue  # a run that diverged leaves no model
            try:
                score_run(outcome.folder, tokens, self._scale.last_words, self._scale.device, check)
            except ValueError as error:  # a text of code has no such words
                print(f"last words are left out: {error}")
                return

    def _last_words(self) -> Iterator[Result]:
        """Of each model, and of warmup against the baseline of its seed."""
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
