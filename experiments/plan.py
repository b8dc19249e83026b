"""The runs of each experiment. A run that two experiments share is trained once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from seqwarm_kernels import SequenceLengthScheduler

from .scales import Scale

SWEEP = "sweep"
TIME, STABILITY, EXTRAPOLATION, SPEED, TOKENS = "a", "b", "c", "d", "e"
LAST_WORDS = "c, last words"  #: further results of the runs of (c)
#: In the order of a call without `--only`. First the one that is cheapest and says most about this package.
EXPERIMENTS = {
    SPEED: "speed and memory by attention",
    SWEEP: "the baseline's learning rate",
    TIME: "time and tokens to the baseline's final loss",
    STABILITY: "larger learning rates and batches, with clipped gradients",
    EXTRAPOLATION: "extrapolation and last words",
    TOKENS: "constant tokens in a step",
}
#: The sweep and stability share runs. Timed runs share none, because they need a quiet machine.
_FOLDERS = {
    SWEEP: "stability",
    TIME: "time",
    STABILITY: "stability",
    EXTRAPOLATION: "extrapolation",
    SPEED: "speed",
    TOKENS: "tokens",
}

_FEW_VALIDATIONS = 4  #: of runs for which only the last one counts

PACKAGE = "package"  #: the attention of this package
CAUSAL, MASKED = "causal", "masked"
#: What becomes of the tokens of a step: the ends of rows are thrown away, or rows are cut into more rows, without and
#: with the square-root rule for the learning rate, or into segments that do not see each other.
TRUNCATED, CONSTANT, SCALED, SEGMENTS = "truncated", "constant", "constant-scaled", "segments"
#: Of the script.
_MODES = {TRUNCATED: "truncate", CONSTANT: "flatten", SCALED: "flatten", SEGMENTS: "segments"}


class Peak(NamedTuple):
    """Peak of the learning rate."""

    rate: float
    share: float  #: of all tokens, at which the peak is reached


@dataclass(frozen=True)
class RunPlan:
    """One training run: the settings that differ between runs."""

    experiment: str
    duration: float  #: share of the tokens; 0 is the baseline
    peak: Peak
    batch_size: int
    seed: int
    objective: str = CAUSAL
    attention: str = PACKAGE
    tokens: str = TRUNCATED

    @property
    def name(self) -> str:
        """The folder of the run, below that of all runs."""
        parts = [
            f"duration{self.duration:g}",
            f"lr{self.peak.rate:g}-after{self.peak.share:g}",
            f"batch{self.batch_size}",
            *([self.objective] if self.objective != CAUSAL else []),
            *([self.attention] if self.experiment == SPEED else []),
            *([self.tokens] if self.tokens != TRUNCATED else []),
            f"seed{self.seed}",
        ]
        return f"{_FOLDERS[self.experiment]}/{'-'.join(parts)}"

    @property
    def keeps_model(self) -> bool:
        """Whether the model is needed to predict last words."""
        return self.experiment in (TIME, EXTRAPOLATION)

    def scheduler(self, scale: Scale) -> SequenceLengthScheduler:
        """The same scheduler as in the script."""
        speed = self.experiment == SPEED
        return SequenceLengthScheduler(
            scale.ramp_min_seq_length if speed else scale.min_seq_length,
            scale.seq_length,
            duration=self.duration * scale.total_tokens,
            step_size=scale.ramp_step_size if speed else scale.step_size,
            unit="token",
        )

    def lr_warmup_steps(self, scale: Scale) -> int:
        """Steps until the peak's share of the tokens. Short batches take more steps.

        DeepSpeed's tutorial on curriculum learning estimates this number from the first length alone (section 2.5).
        """
        scheduler = self.scheduler(scale)
        steps = 0
        while scheduler.progress < self.peak.share * scale.total_tokens:
            full, length = scale.seq_length, scheduler.seq_length
            rows = self.batch_size if self.tokens == TRUNCATED else self.batch_size * full // length
            scheduler.step(self.batch_size * full if self.tokens == SEGMENTS else rows * length)
            steps += 1
        return steps

    def arguments(self, scale: Scale, text: list[Path], out: Path) -> list[str]:
        """Arguments of the script, which starts or resumes the run."""
        scheduler = self.scheduler(scale)
        by_experiment = {SPEED: ramp_validations(scale), TIME: scale.validations, TOKENS: scale.validations}
        validations = by_experiment.get(self.experiment, _FEW_VALIDATIONS)
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
            *(["--mode", _MODES[self.tokens]] if self.tokens != TRUNCATED else []),
            *(["--scale-learning-rate"] if self.tokens == SCALED else []),
            *(["--compile"] if scale.compile else []),
            "--resume",
        ]


def sweep_runs(scale: Scale) -> list[RunPlan]:
    """The baseline with each learning rate and each length of the learning-rate warmup."""
    return [
        RunPlan(SWEEP, 0.0, Peak(rate, share), scale.batch_size, seed)
        for share in scale.lr_warmup_shares
        for rate in scale.learning_rates
        for seed in range(scale.sweep_seeds)
    ]


def duration_runs(scale: Scale, peak: Peak) -> list[RunPlan]:
    """Every duration with seed 0."""
    return [*_grid(TIME, scale.durations, [0], scale, peak), half_batch_run(scale, peak, 0)]


def half_batch_run(scale: Scale, peak: Peak, seed: int) -> RunPlan:
    """A baseline with more steps for the same tokens, as with warmup. Do the steps explain the gain?"""
    return RunPlan(TIME, 0.0, peak, scale.batch_size // 2, seed)


def best_duration_runs(scale: Scale, peak: Peak, best: float, seeds: int) -> list[RunPlan]:
    """The baselines and the best duration, with the seeds that did not choose this duration."""
    others = range(1, seeds)
    durations = _grid(TIME, (0.0, best), others, scale, peak)
    return [*durations, *(half_batch_run(scale, peak, seed) for seed in others if not scale.one_half_batch)]


def stability_runs(scale: Scale, peak: Peak) -> list[RunPlan]:
    """Baseline and warmup at growing learning rates and batch sizes. Larger batches have one seed."""
    return [
        RunPlan(STABILITY, duration, peak._replace(rate=peak.rate * factor), scale.batch_size * batch_factor, seed)
        for batch_factor in scale.batch_factors
        for seed in range(scale.stability_seeds if batch_factor == 1 else 1)
        for factor in scale.learning_rate_factors
        for duration in (0.0, scale.duration)
    ]


def extrapolation_runs(scale: Scale, peak: Peak, seeds: int, best: float | None = None) -> list[RunPlan]:
    """Baseline and warmup with each seed, and one masked pair. `best`: duration of timed runs, if they are reused."""
    kind, warm = (TIME, best or scale.duration) if scale.extrapolate_timed else (EXTRAPOLATION, scale.duration)
    causal = _grid(kind, (0.0, warm), range(seeds), scale, peak)
    masked = _grid(EXTRAPOLATION, (0.0, scale.duration), [0], scale, peak)
    return [*causal, *(replace(run, objective=MASKED) for run in masked)]


def extrapolated_runs(scale: Scale, peak: Peak, seeds: int) -> list[RunPlan]:
    """The timed runs that extrapolation reads, if they are finished."""
    if not scale.extrapolate_timed:
        return []
    return _grid(TIME, scale.durations, range(seeds), scale, peak)


def _grid(
    experiment: str, durations: Collection[float], seeds: Collection[int], scale: Scale, peak: Peak
) -> list[RunPlan]:
    return [RunPlan(experiment, duration, peak, scale.batch_size, seed) for seed in seeds for duration in durations]


def speed_runs(scale: Scale) -> list[RunPlan]:
    """The attentions in turn, so that other load on the machine affects all of them. Needs no result of the sweep."""
    duration, peak = ramp_duration(scale), middle_peak(scale)
    return [
        RunPlan(SPEED, duration, peak, scale.batch_size, seed, attention=attention)
        for seed in range(scale.speed_repeats)
        for attention in (PACKAGE, *scale.attentions)
    ]


def middle_peak(scale: Scale) -> Peak:
    """The peak of runs that do not wait for the sweep. With the toy it is the one that the sweep chose."""
    return Peak(scale.learning_rates[(len(scale.learning_rates) - 1) // 2], scale.lr_warmup_shares[-1])


def constant_token_runs(scale: Scale, seeds: int) -> list[RunPlan]:
    """Warmup with constant tokens in a step, and what it is compared with. Needs no result of the sweep.

    The longest duration comes first, with all seeds.
    """
    full = RunPlan(TOKENS, 0.0, middle_peak(scale), scale.batch_size, 0)
    controls = [full, replace(full, batch_size=scale.batch_size // 2)]
    longest, *others = [
        [replace(full, duration=duration, tokens=tokens) for tokens in (TRUNCATED, CONSTANT, SCALED, SEGMENTS)]
        for duration in dict.fromkeys((max(scale.durations), scale.duration))
    ]
    half = replace(longest[1], batch_size=scale.batch_size // 2)  # as many steps as the second control
    groups = [[*controls, *longest], *others, [half]]
    return [replace(run, seed=seed) for runs in groups for seed in range(seeds) for run in runs]


def ramp_duration(scale: Scale) -> float:
    """Duration of the ramp whose speed is measured, so that each length trains from one validation to the next."""
    stages = (scale.seq_length - scale.ramp_min_seq_length) // scale.ramp_step_size
    return stages / ramp_validations(scale)


def ramp_validations(scale: Scale) -> int:
    """Number of validations of that run: one for each length of the ramp, and three more at the full length."""
    stages = (scale.seq_length - scale.ramp_min_seq_length) // scale.ramp_step_size
    return stages + 3
