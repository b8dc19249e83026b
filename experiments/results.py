"""The results of each experiment: one result for each run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seqwarm_kernels.demo.records import Comparison, Record, full_length_speed

from .plan import EXTRAPOLATION, PACKAGE, SPEED, STABILITY, SWEEP, TIME, TOKENS, Peak, RunPlan
from .reading import ValidationRecord, as_demo_records, read_steps, read_validations
from .running import RunOutcome
from .statistics import correlation, count_spikes

#: A run "trains" if its final validation loss is at most this many times that of the baseline at the best rate.
TRAINS = 1.1


@dataclass(frozen=True)
class Result:
    """One run, or one comparison of runs."""

    experiment: str
    case: dict[str, Any]
    figures: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


def case_of(run: RunPlan) -> dict[str, Any]:
    return {
        "duration": run.duration,
        "learning_rate": run.peak.rate,
        "lr_warmup_share": run.peak.share,
        "batch_size": run.batch_size,
        "seed": run.seed,
        "objective": run.objective,
        **({"tokens": run.tokens} if run.experiment == TOKENS else {}),
    }


def final_loss(validations: Sequence[ValidationRecord]) -> float | None:
    """The loss at the shortest validation length, which is the full training length. None if the run diverged."""
    last = validations[-1]
    loss = last.validation_loss.get(min(last.validation_loss, default=0), math.nan)
    return None if last.diverged or not math.isfinite(loss) else loss


def sweep_results(outcomes: Iterable[RunOutcome]) -> list[Result]:
    return [Result(SWEEP, case_of(o.run), {"final_loss": final_loss(read_validations(o.folder))}) for o in outcomes]


def best_peak(results: Iterable[Result]) -> Peak | None:
    """The peak with the smallest mean final loss over the seeds. Peaks with a diverged run are ruled out."""
    losses: dict[Peak, list[float]] = {}
    for result in results:
        loss = result.figures["final_loss"]
        peak = Peak(result.case["learning_rate"], result.case["lr_warmup_share"])
        losses.setdefault(peak, []).append(math.inf if loss is None else loss)
    means = {peak: sum(found) / len(found) for peak, found in losses.items()}
    best = min(means, key=lambda peak: means[peak], default=None)
    return best if best is not None and math.isfinite(means[best]) else None


def time_results(outcomes: Sequence[RunOutcome], length: int) -> list[Result]:
    """Each run compared with the baseline that has the same seed and the full batch, if that is finished.

    If the baseline diverged, there is no loss to reach.
    """
    batch_size = max((outcome.run.batch_size for outcome in outcomes), default=0)
    validations = {outcome: read_validations(outcome.folder) for outcome in outcomes}
    baselines = {
        o.run.seed: [] if found[-1].diverged else as_demo_records(found, length)
        for o, found in validations.items()
        if o.run.duration == 0 and o.run.batch_size == batch_size
    }
    return [
        Result(TIME, case_of(o.run), {**_time_figures(found, baselines[o.run.seed], length), "busy": o.busy})
        for o, found in validations.items()
        if o.run.seed in baselines
    ]


def _time_figures(validations: Sequence[ValidationRecord], baseline: list[Record], length: int) -> dict[str, Any]:
    curve = as_demo_records(validations, length)
    theirs = Comparison(baseline, baseline).baseline_crossing if baseline else None
    reached = Comparison(baseline, curve).warmup_crossing if baseline and curve else None
    last = validations[-1]
    return {
        "final_loss": final_loss(validations),
        "steps": last.step,
        "tokens": last.tokens,
        "seconds": last.seconds,
        "target_loss": baseline[-1].validation_loss if baseline else None,
        "reached_after_tokens": reached and reached.tokens,
        "reached_after_seconds": reached and reached.seconds,
        "sooner_in_tokens": theirs.tokens / reached.tokens if theirs and reached else None,
        "sooner_in_seconds": theirs.seconds / reached.seconds if theirs and reached else None,
        "full_length_speed": full_length_speed(curve) if curve else None,
        "curve": [[record.tokens, record.seconds, record.validation_loss] for record in curve],
    }


def token_results(outcomes: Sequence[RunOutcome], length: int) -> list[Result]:
    """Losses and tokens as in (a). Times are left out, because these runs need no quiet machine."""
    timed = ("seconds", "reached_after_seconds", "sooner_in_seconds", "full_length_speed", "busy")
    found = []
    for result in time_results(outcomes, length):
        figures = {name: value for name, value in result.figures.items() if name not in timed}
        figures["curve"] = [[tokens, loss] for tokens, _, loss in figures["curve"]]
        found.append(Result(TOKENS, result.case, figures))
    return found


def best_duration(results: Iterable[Result]) -> float | None:
    """The duration that reached the baseline's final loss first, with seed 0. None if no duration reached it."""
    reached = {
        result.case["duration"]: result.figures["reached_after_seconds"]
        for result in results
        if result.case["seed"] == 0 and result.case["duration"] > 0 and result.figures["reached_after_seconds"]
    }
    return min(reached, key=lambda duration: reached[duration], default=None)


def stability_results(outcomes: Sequence[RunOutcome], peak: Peak) -> list[Result]:
    """Spikes, divergence, and the correlation of loss ratio and Adam's variance. `peak`: the baseline's best."""
    losses = {outcome.run: final_loss(read_validations(outcome.folder)) for outcome in outcomes}
    results = []
    for outcome in outcomes:
        run, steps = outcome.run, read_steps(outcome.folder)
        reference = losses.get(RunPlan(run.experiment, 0.0, peak, run.batch_size, run.seed))
        loss = losses[run]
        case = {**case_of(run), "learning_rate_factor": round(run.peak.rate / peak.rate, 6)}
        figures = {
            "steps": len(steps.loss),
            "spikes": count_spikes(steps.loss_ratio),
            "largest_ratio": _largest(steps.loss_ratio),
            "largest_variance_max": _largest(steps.variance_max),
            "diverged": loss is None,
            "final_loss": loss,
            "trains": None if reference is None else loss is not None and loss <= TRAINS * reference,
            "ratio_with_variance_max": _as_dict(correlation(steps.variance_max, steps.loss_ratio)),
            "ratio_with_variance_l1": _as_dict(correlation(steps.variance_l1, steps.loss_ratio)),
        }
        results.append(Result(STABILITY, case, figures))
    return results


def _largest(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else None


def _as_dict(found: Any) -> dict[str, float] | None:
    return None if found is None else found._asdict()


def extrapolation_results(outcomes: Iterable[RunOutcome]) -> list[Result]:
    """The losses of the last validation at each length."""
    results = []
    for outcome in outcomes:
        last = read_validations(outcome.folder)[-1]
        losses = {str(length): loss for length, loss in last.validation_loss.items()}
        results.append(Result(EXTRAPOLATION, case_of(outcome.run), {"loss_by_length": losses}))
    return results


def shown_lengths(lengths: Iterable[int]) -> list[int]:
    """Some lengths of a ramp: the last, and down from there each at most half of the one before."""
    shown: list[int] = []
    for length in sorted(lengths, reverse=True):
        if not shown or shown[-1] >= 2 * length:
            shown.append(length)
    return shown[::-1]


def speed_results(outcomes: Iterable[RunOutcome]) -> list[Result]:
    """Tokens per second and memory between two validations: one length of the ramp each."""
    results = []
    for outcome in outcomes:
        case = {"attention": outcome.run.attention, "seed": outcome.run.seed}
        if outcome.failure is not None:
            results.append(Result(SPEED, case, failure=outcome.failure))
            continue
        validations = [v for v in read_validations(outcome.folder) if v.tokens > 0]
        stages = [[v.seq_length, v.tokens_per_second, v.peak_memory_bytes] for v in validations]
        whole = validations[-1].tokens / validations[-1].seconds
        figures = {"tokens_per_second": whole, "by_length": stages, "busy": outcome.busy}
        results.append(Result(SPEED, case, {**figures, "final_loss": final_loss(validations)}))
    return results


def by_attention(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Results grouped by attention, this package's first."""
    found: dict[str, list[Result]] = {PACKAGE: []}
    for result in results:
        found.setdefault(result.case["attention"], []).append(result)
    return found
