"""The experiments in their order. The sweep chooses the learning rate, and seed 0 chooses the best duration."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from . import plan, results
from .last_words import read_scores, score_run
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
            if experiment not in (plan.SPEED, plan.TOKENS):
                self._sweep()
            if experiment == plan.TIME:  # they choose the best duration, which further runs need
                self._runner.run_all(self._duration_runs(), plan.EXPERIMENTS[plan.TIME])
            self._runner.run_all(self._runs(experiment), plan.EXPERIMENTS[experiment])
            if experiment == plan.EXTRAPOLATION:
                self._score_all()

    def _sweep(self) -> None:
        self._runner.run_all(plan.sweep_runs(self._scale), plan.EXPERIMENTS[plan.SWEEP])
        if self._peak() is None:
            raise RunFailed("the baseline diverged at each learning rate of the sweep, so (a), (b) and (c) cannot run")

    def all_results(self) -> list[results.Result]:
        """The results of all finished runs, also those of earlier calls."""
        peak = self._peak()
        return [
            *results.sweep_results(self._finished(plan.SWEEP)),
            *results.time_results(self._finished(plan.TIME), self._scale.seq_length),
            *(results.stability_results(self._finished(plan.STABILITY), peak) if peak else []),
            *results.extrapolation_results(self._finished(plan.EXTRAPOLATION)),
            *self._last_words(),
            *results.speed_results(self._finished(plan.SPEED)),
            *results.token_results(self._finished(plan.TOKENS), self._scale.seq_length),
        ]

    def environments(self) -> list[dict[str, Any]]:
        """The machines that finished runs were trained on, each once. Old runs did not record theirs."""
        outcomes = [outcome for experiment in plan.EXPERIMENTS for outcome in self._finished(experiment)]
        found: list[dict[str, Any]] = []
        for outcome in outcomes:
            if outcome.environment and outcome.environment not in found:
                found.append(outcome.environment)
        return found

    def _finished(self, experiment: str) -> list[RunOutcome]:
        runs, peak = self._runs(experiment), self._peak() if experiment == plan.EXTRAPOLATION else None
        if peak is not None:  # runs stay in the results even if another duration becomes the best
            runs = list(dict.fromkeys([*runs, *plan.extrapolated_runs(self._scale, peak, self._seeds)]))
        return self._runner.finished(runs)

    def _peak(self) -> plan.Peak | None:
        """The best peak of the learning rate. None if the sweep is not finished, or every peak diverged."""
        sweep = plan.sweep_runs(self._scale)
        finished = self._runner.finished(sweep)
        return results.best_peak(results.sweep_results(finished)) if len(finished) == len(sweep) else None

    def _duration_runs(self) -> list[plan.RunPlan]:
        peak = self._peak()
        return plan.duration_runs(self._scale, peak) if peak else []

    def _best_duration(self) -> float | None:
        """The best duration. None if not all durations are finished, or none reached the baseline's loss."""
        first = self._duration_runs()
        finished = self._runner.finished(first)
        if len(finished) < len(first):
            return None
        return results.best_duration(results.time_results(finished, self._scale.seq_length))

    def _runs(self, experiment: str) -> list[plan.RunPlan]:
        """The runs of an experiment that are known so far: some depend on the results of others."""
        if experiment == plan.SWEEP:
            return plan.sweep_runs(self._scale)
        if experiment == plan.SPEED:
            return plan.speed_runs(self._scale)
        if experiment == plan.TOKENS:
            return plan.constant_token_runs(self._scale, self._seeds)
        peak = self._peak()
        if peak is None:
            return []
        if experiment == plan.STABILITY:
            return plan.stability_runs(self._scale, peak)
        best = self._best_duration()
        if experiment == plan.EXTRAPOLATION:
            return plan.extrapolation_runs(self._scale, peak, self._seeds, best)
        others = [] if best is None else plan.best_duration_runs(self._scale, peak, best, self._seeds)
        return [*self._duration_runs(), *others]

    def _causal(self) -> list[RunOutcome]:
        return [outcome for outcome in self._finished(plan.EXTRAPOLATION) if outcome.run.objective == plan.CAUSAL]

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

    def _last_words(self) -> Iterator[results.Result]:
        """Scores of each model, and of warmup compared with the baseline of the same seed."""
        found = {outcome.run: read_scores(outcome.folder) for outcome in self._causal()}
        scores = {run: each for run, each in found.items() if each is not None}
        baselines = {run.seed: own for run, own in scores.items() if run.duration == 0}
        for run, own in scores.items():
            figures: dict[str, float | None] = {"items": len(own.right), "accuracy": own.accuracy}
            figures["perplexity"] = own.perplexity
            if run.duration > 0 and run.seed in baselines:
                theirs = baselines[run.seed]
                figures["p"] = sign_test(own.right, theirs.right)
                fewer = [a - b for a, b in zip(theirs.nats, own.nats, strict=True)]
                figures["nats_fewer"], figures["nats_fewer_error"] = mean_and_error(fewer)
            yield results.Result(plan.LAST_WORDS, results.case_of(run), figures)
