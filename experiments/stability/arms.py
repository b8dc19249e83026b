"""What is compared in an unstable regime: warmup, and alternatives that cost less. All train on the same tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from .settings import BASELINE, BATCH, CONSTANT, POST, SHORT, WARMUP, Setting

#: What each arm changes.
ARMS: dict[str, dict[str, Any]] = {
    "baseline": {"kind": BASELINE},
    "warmup 0.1": {"kind": WARMUP, "duration": 0.1},
    "warmup 0.3": {"kind": WARMUP, "duration": 0.3},
    "warmup 0.9": {"kind": WARMUP, "duration": 0.9},
    "constant tokens 0.3": {"kind": CONSTANT, "duration": 0.3},
    "rows of 128": {"kind": SHORT, "min_seq_length": 128},
    "batch warmup 0.3": {"kind": BATCH, "duration": 0.3},
    "learning-rate warmup 0.3": {"kind": BASELINE, "lr_warmup": 0.3},
    "clipped to 1": {"kind": BASELINE, "clip": 1.0},
    # Added after three seeds of the others: its rate peaks after about as many steps as that of the baseline.
    "warmup 0.3, 6 steps": {"kind": WARMUP, "duration": 0.3, "lr_warmup": 0.0065},
}
FIRST, BEST = "baseline", "warmup 0.3"  #: of a call without --full


@dataclass(frozen=True)
class Comparison:
    """Arms with the same model, number of tokens, and size of a full batch."""

    name: str
    changes: dict[str, Any]  #: of a run's defaults
    rates: tuple[float, ...]  #: the grid
    seeds: int
    arms: tuple[str, ...] = tuple(ARMS)

    def setting(self, arm: str, rate: float, seed: int) -> Setting:
        return replace(replace(Setting(rate, seed), **self.changes), **ARMS[arm])

    def settings(self, arms: Iterable[str] | None = None) -> list[Setting]:
        """Seed by seed, so that a stopped call has whole seeds."""
        names = self.arms if arms is None else arms
        return [self.setting(arm, rate, seed) for seed in range(self.seeds) for arm in names for rate in self.rates]

    def arm_of(self, setting: Setting) -> str:
        """The name of the arm of one of its runs."""
        return next(arm for arm in self.arms if setting == self.setting(arm, setting.rate, setting.seed))


#: The regime that the search chose. In the search its baseline trained at 0.003, and ended near the entropy of single
#: bytes, 3.15 nats, at 0.01, 0.03 and 0.1.
MAIN = Comparison("post-norm", {"norm": POST}, (2e-3, 4e-3, 8e-3, 1.6e-2), 5)
#: 4 times the rows, for the question which batch trains; and 4 times the tokens, so that steps are as many.
LARGE = Comparison(
    "post-norm, 4 times the batch",
    {"norm": POST, "rows": 16, "tokens": 800_000},
    MAIN.rates[1:],
    3,
    (FIRST, BEST, "learning-rate warmup 0.3"),
)
#: The other unstable regime of the search, in which attention logits grow. At the rates beside its edge.
PRE_NORM = Comparison("pre-norm", {}, (1e-2, 3e-2), 5)
COMPARISONS = (MAIN, LARGE, PRE_NORM)
TUNED_RATE = 8e-3  #: at which the tuner searches


def first_settings() -> list[Setting]:
    """Baseline and warmup at every rate: the answer, without the alternatives."""
    return MAIN.settings((FIRST, BEST))


def full_settings() -> list[Setting]:
    return [setting for comparison in COMPARISONS for setting in comparison.settings()]


def tuned_settings() -> list[Setting]:
    """The runs that the tuner starts from."""
    return [MAIN.setting(FIRST, TUNED_RATE, seed) for seed in range(MAIN.seeds)]


def quick_settings() -> list[Setting]:
    """One seed, for a look. At every rate, since "trains" is measured by the best baseline's."""
    return [setting for setting in first_settings() if setting.seed == 0]
