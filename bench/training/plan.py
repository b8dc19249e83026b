"""Which runs an experiment needs. A run that two experiments share is trained once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from seqwarm_kernels import SequenceLengthScheduler

from .scales import Scale

SWEEP = "sweep"
TIME, STABILITY, EXTRAPOLATION, SPEED = "a", "b", "c", "d"
LAST_WORDS = "c, last words"  #: results of the same runs, of another kind
#: In the order of a call without `--only`: what needs least, and says most about this package, comes first.
EXPERIMENTS = {
    SPEED: "speed and memory by attention",
    SWEEP: "the baseline's learning rate",
    TIME: "time and tokens to the baseline's final loss",
    STABILITY: "stability",
    EXTRAPOLATION: "extrapolation and last words",
}
#: Runs of the sweep and of stability train the same; those that are timed are on their own, for a quiet machine.
_FOLDERS = {SWEEP: "stability", TIME: "time", STABILITY: "stability", EXTRAPOLATION: "extrapolation", SPEED: "speed"}

_FEW_VALIDATIONS = 4  #: where only the last one counts

PACKAGE = "package"  #: the attention of this package
CAUSAL, MASKED = "causal", "masked"


class Peak(NamedTuple):
    """Of the learning rate."""

    rate: float
    share: float  #: of all tokens, until it is reached


@dataclass(frozen=True)
class Run:
    """One training run: what differs from one to the next."""

    experiment: str
    duration: float  #: share of the tokens; 0 is the baseline
    peak: Peak
    batch_size: int
    seed: int
    objective: str = CAUSAL
    attention: str = PACKAGE

    @property
    def name(self) -> str:
        """Its folder below that of all runs."""
        parts = [
            f"duration{self.duration:g}",
            f"lr{self.peak.rate:g}-after{self.peak.share:g}",
            f"batch{self.batch_size}",
            *([self.objective] if self.objective != CAUSAL else []),
            *([self.attention] if self.experiment == SPEED else []),
            f"seed{self.seed}",
        ]
        return f"{_FOLDERS[self.experiment]}/{'-'.join(parts)}"

    @property
    def keeps_model(self) -> bool:
        """Whether its last words may be asked for."""
        return self.experiment in (TIME, EXTRAPOLATION)

    def scheduler(self, scale: Scale) -> SequenceLengthScheduler:
        """As the script makes it."""
        speed = self.experiment == SPEED
        return SequenceLengthScheduler(
            scale.ramp_min_seq_length if speed else scale.min_seq_length,
            scale.seq_length,
            duration=self.duration * scale.total_tokens,
            step_size=scale.ramp_step_size if speed else scale.step_size,
            unit="token",
        )

    def lr_warmup_steps(self, scale: Scale) -> int:
        """Those until a share of the tokens: short batches are more steps.

        DeepSpeed's tutorial on curriculum learning estimates them in section 2.5 from the first length alone.
        """
        scheduler = self.scheduler(scale)
        steps = 0
        while scheduler.progress < self.peak.share * scale.total_tokens:
            scheduler.step(self.batch_size * scheduler.seq_length)
            steps += 1
        return steps

    def arguments(self, scale: Scale, text: list[Path], out: Path) -> list[str]:
        """For the script, which begins the run or goes on with it."""
        scheduler = self.scheduler(scale)
        validations = {SPEED: ramp_validations(scale), TIME: scale.validations}.get(self.experiment, _FEW_VALIDATIONS)
        is_long = self.experiment == EXTRAPOLATION or (self.experiment == TIME and scale.extrapolate_timed)
        lengths = [scale.seq_length * factor for factor in ((1, 2, 4) if is_long else (1,))]
        options: dict[str, object] = {
            "--size": scale.size,
            "--device": scale.device,
            "--precision": scale.precision,
            "--vocab-size": scale.vocab_size,
            "--seq-length": scale.seq_length,
            "--batch-size": self.batch_size,
            "--micro-batch-size": min(self.batch_size, scale.micro_batch_size),
            "--total-tokens": scale.total_tokens,
            "--learning-rate": self.peak.rate,
            "--lr-warmup-steps": self.lr_warmup_steps(scale),
            "--warmup-duration": self.duration,
            "--min-seq-length": scheduler.min_seq_length,
            "--step-size": scheduler.step_size,
            "--objective": self.objective,
            "--validate-every": 1 / validations,
            "--validation-tokens": scale.validation_tokens,
            "--seed": self.seed,
            "--out": out / "runs" / self.name,
            "--cache": out / "tokens",
        }
        given = [part for name, value in options.items() for part in (name, str(value))]
        return [
            *given,
            *("--validation-lengths", *map(str, lengths)),
            *("--text", *map(str, text)),
            "--resume",
        ]


def sweep_runs(scale: Scale) -> list[Run]:
    """The baseline at each learning rate, reached soon or late."""
    return [
        Run(SWEEP, 0.0, Peak(rate, share), scale.batch_size, seed)
        for share in scale.lr_warmup_shares
        for rate in scale.learning_rates
        for seed in range(scale.sweep_seeds)
    ]


def duration_runs(scale: Scale, peak: Peak) -> list[Run]:
    """Every duration, once."""
    durations = [Run(TIME, duration, peak, scale.batch_size, 0) for duration in scale.durations]
    return [*durations, half_batch_run(scale, peak, 0)]


def half_batch_run(scale: Scale, peak: Peak, seed: int) -> Run:
    """A baseline that makes more steps of the same tokens, as warmup does: is it only that?"""
    return Run(TIME, 0.0, peak, scale.batch_size // 2, seed)


def best_duration_runs(scale: Scale, peak: Peak, best: float, seeds: int) -> list[Run]:
    """The baselines and the best duration with the seeds that did not choose it."""
    others = range(1, seeds)
    durations = [Run(TIME, duration, peak, scale.batch_size, seed) for seed in others for duration in (0.0, best)]
    return [*durations, *(half_batch_run(scale, peak, seed) for seed in others if not scale.one_half_batch)]


def stability_runs(scale: Scale, peak: Peak) -> list[Run]:
    """Baseline and warmup at growing learning rate; larger batches once."""
    return [
        Run(STABILITY, duration, peak._replace(rate=peak.rate * factor), scale.batch_size * batch_factor, seed)
        for batch_factor in scale.batch_factors
        for seed in range(scale.stability_seeds if batch_factor == 1 else 1)
        for factor in scale.learning_rate_factors
        for duration in (0.0, scale.duration)
    ]


def extrapolation_runs(scale: Scale, peak: Peak, seeds: int, best: float | None = None) -> list[Run]:
    """Baseline and warmup with each seed; one masked pair. `best`: the first experiment's, where its runs will do."""
    kind, warm = (TIME, best or scale.duration) if scale.extrapolate_timed else (EXTRAPOLATION, scale.duration)
    causal = [Run(kind, duration, peak, scale.batch_size, seed) for seed in range(seeds) for duration in (0.0, warm)]
    masked = [
        Run(EXTRAPOLATION, duration, peak, scale.batch_size, 0, objective=MASKED) for duration in (0.0, scale.duration)
    ]
    return [*causal, *masked]


def extrapolated_runs(scale: Scale, peak: Peak, seeds: int) -> list[Run]:
    """All those of the first experiment that extrapolation looks at, where they are finished."""
    if not scale.extrapolate_timed:
        return []
    return [Run(TIME, duration, peak, scale.batch_size, seed) for seed in range(seeds) for duration in scale.durations]


def speed_runs(scale: Scale) -> list[Run]:
    """The implementations in turn, so that what else the machine does hits all alike. No speed waits for the sweep."""
    middle = scale.learning_rates[(len(scale.learning_rates) - 1) // 2]
    duration, peak = ramp_duration(scale), Peak(middle, scale.lr_warmup_shares[-1])
    return [
        Run(SPEED, duration, peak, scale.batch_size, seed, attention=attention)
        for seed in range(scale.speed_repeats)
        for attention in (PACKAGE, *scale.attentions)
    ]


def ramp_duration(scale: Scale) -> float:
    """Of the ramp whose speed is measured: each of its lengths trains from one validation to the next."""
    stages = (scale.seq_length - scale.ramp_min_seq_length) // scale.ramp_step_size
    return stages / ramp_validations(scale)


def ramp_validations(scale: Scale) -> int:
    """Three tenths of the run are at the full length."""
    stages = (scale.seq_length - scale.ramp_min_seq_length) // scale.ramp_step_size
    return stages + 3
