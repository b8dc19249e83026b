"""The search for a regime in which the baseline is unstable. Only baselines are trained for it.

Where to look comes from "Small-scale proxies for large-scale Transformer training instabilities" (arXiv 2309.14322):
large learning rates without query and key norms and without a z-loss, where attention logits and output logits grow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .settings import BF16, POST, Setting

RATES = (3e-3, 1e-2, 3e-2, 1e-1)
SEEDS = 2

#: What each regime changes in the first one: 6 layers of width 64, pre-norm, float32, 4 rows of 512 tokens, 200,000
#: tokens (98 steps), no clipping, beta2 0.999, a learning-rate warmup of 5 % of the tokens (5 steps).
FIRST = "pre-norm, 6 layers of 64"
REGIMES: dict[str, dict[str, Any]] = {
    FIRST: {},
    "post-norm": {"norm": POST},
    "beta2 0.99": {"beta2": 0.99},
    "beta2 0.95": {"beta2": 0.95},
    "no learning-rate warmup": {"lr_warmup": 0.001},
    "clipped to 1": {"clip": 1.0},
    "clipped to 10": {"clip": 10.0},
    "bfloat16": {"precision": BF16},
    "2 rows of 1,024": {"rows": 2, "seq_length": 1024},
    "8 rows": {"rows": 8},
    "12 layers of 64": {"layers": 12},
    "12 layers of 64, post-norm": {"layers": 12, "norm": POST},
    "12 layers of 128": {"layers": 12, "width": 128, "heads": 4},
    "24 layers of 64, post-norm": {"layers": 24, "norm": POST},
    "24 layers of 64": {"layers": 24},
    "64 rows, 20 steps, bfloat16": {"rows": 64, "precision": BF16, "tokens": 655_360},
    "64 rows, 98 steps": {"rows": 64, "tokens": 3_200_000},
}
#: Slow regimes have one seed and fewer rates.
_FEW = {
    "12 layers of 128": (3e-3, 1e-2, 3e-2),
    "24 layers of 64, post-norm": (1e-3, 3e-3, 1e-2),
    "24 layers of 64": (3e-3, 1e-2, 3e-2),
    "12 layers of 64": (1e-3, 3e-3, 1e-2, 3e-2),
    "12 layers of 64, post-norm": (1e-3, 3e-3, 1e-2, 3e-2),
    "64 rows, 20 steps, bfloat16": (1e-2, 3e-2, 1e-1),
    "64 rows, 98 steps": RATES,
}


def settings_of(regime: str) -> list[Setting]:
    rates, seeds = _FEW.get(regime, RATES), 1 if regime in _FEW else SEEDS
    return [replace(Setting(rate, seed), **REGIMES[regime]) for rate in rates for seed in range(seeds)]


def all_settings() -> list[Setting]:
    """The first seed of every regime before the others."""
    settings = [setting for regime in REGIMES for setting in settings_of(regime)]
    return sorted(settings, key=lambda setting: setting.seed)
