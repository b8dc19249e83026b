"""What the runs of a comparison show: which train, how often, and how they compare seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from .definitions import Interval, paired, share, trains
from .running import Record
from .settings import Setting

SEARCH, ARMS, TUNER = "search", "arms", "tuner"  #: parts of the records
MOST = 0.5  #: "most seeds" are more than this share


@dataclass(frozen=True)
class Run:
    """A run of an arm, beside the best baseline of its comparison."""

    arm: str
    rate: float
    seed: int
    trains: bool
    figures: dict[str, Any]
    steps_to_peak: int = 0  #: of the learning rate

    @property
    def is_unstable(self) -> bool:
        """Does not train, and spikes or diverges."""
        return not self.trains and (self.figures["diverges"] or self.figures["spikes"] > 0)


def best_baseline(baselines: Iterable[Record]) -> float | None:
    """The smallest, over the rates, of the mean final loss over the seeds. A rate with a diverged seed is left out."""
    losses: dict[float, list[float]] = {}
    for record in baselines:
        loss = record["figures"]["final_loss"]
        losses.setdefault(record["setting"]["rate"], []).append(math.inf if loss is None else loss)
    best = min(map(mean, losses.values()), default=math.inf)
    return best if math.isfinite(best) else None


def judge(records: Sequence[Record], baseline: str) -> list[Run]:
    """The runs of one comparison: same model, tokens and size of a full batch. `baseline` names the baseline's arm."""
    best = best_baseline(record for record in records if record["name"] == baseline)
    found = [
        Run(
            record["name"],
            record["setting"]["rate"],
            record["setting"]["seed"],
            trains(record["figures"]["final_loss"], best),
            record["figures"],
            Setting(**record["setting"]).steps_to_peak(),
        )
        for record in records
    ]
    return sorted(found, key=lambda run: (run.rate, run.seed))


def of(runs: Iterable[Run], arm: str, rate: float) -> list[Run]:
    return [run for run in runs if (run.arm, run.rate) == (arm, rate)]


def rates_of(runs: Iterable[Run]) -> list[float]:
    return sorted({run.rate for run in runs})


def share_of(runs: Sequence[Run], holds: Callable[[Run], bool]) -> Interval | None:
    """The share of runs for which `holds`, with its exact interval. None without runs."""
    return share(sum(map(holds, runs)), len(runs)) if runs else None


def is_unstable_regime(runs: Sequence[Run]) -> bool:
    """Whether a baseline is unstable in the sense of `definitions.py`."""
    rates = rates_of(runs)
    unstable = [mean(run.is_unstable for run in runs if run.rate == rate) > MOST for rate in rates]
    training = [mean(run.trains for run in runs if run.rate == rate) > MOST for rate in rates]
    pairs = [place for place in range(len(rates) - 1) if unstable[place] and unstable[place + 1]]
    return any(any(training[:place]) for place in pairs)


def largest_rate(runs: Sequence[Run]) -> float | None:
    """The largest rate at which most seeds train. `runs` are those of one arm."""
    trained = [rate for rate in rates_of(runs) if mean(run.trains for run in runs if run.rate == rate) > MOST]
    return max(trained, default=None)


def gained_and_lost(runs: Sequence[Run], arm: str, baseline: str, rate: float) -> tuple[int, int, int]:
    """Seeds at this rate in which only `arm` trains, in which only the baseline trains, and all that have both."""
    theirs = {run.seed: run.trains for run in of(runs, baseline, rate)}
    own = {run.seed: run.trains for run in of(runs, arm, rate)}
    seeds = sorted(theirs.keys() & own.keys())
    gained, lost = paired([theirs[seed] for seed in seeds], [own[seed] for seed in seeds])
    return gained, lost, len(seeds)
