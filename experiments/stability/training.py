"""Trains one run and measures it: loss, Adam's variance and the norm of the gradients at every step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import seqwarm_kernels as sw
from seqwarm_kernels.diagnostics import moment_statistics

from ..statistics import correlation, count_spikes
from .batches import Batches, validation_windows
from .definitions import diverges, loss_ratios
from .model import GPT, largest_logits
from .settings import BF16, Setting

PROBES = 8  #: looks at the logits, evenly spread over the tokens
CURVE_POINTS = 40
_COLUMNS = ("loss", "variance_l1", "variance_max", "grad_norm")
BETA1, WEIGHT_DECAY, EPSILON = 0.9, 0.1, 1e-8


class Trainer:
    """A model, its optimizer and its batches.

    Args:
        setting: The run.
        scheduler: As for `Batches`.
    """

    def __init__(self, setting: Setting, scheduler: sw.SequenceLengthScheduler | None = None) -> None:
        self.setting, self.batches = setting, Batches(setting, scheduler)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setting.seed)
            self.model = GPT(setting)
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim >= 2]
        vectors = [parameter for parameter in self.model.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        betas = (BETA1, setting.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=setting.rate, betas=betas, eps=EPSILON, fused=True)
        self._held_out = validation_windows(setting)

    @property
    def tokens(self) -> int:
        return self.batches.scheduler.progress

    def step(self) -> tuple[float, float, float, float]:
        """One optimizer step: loss, Σ √v, the largest √v after the step, and the gradients' norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.setting.learning_rate(self.tokens)
        batch = self.batches.next()
        with self._autocast():
            logits = self.model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        moments = moment_statistics(self.optimizer)
        assert moments.variance_l1 is not None
        assert moments.variance_max is not None
        return loss.item(), moments.variance_l1.item(), moments.variance_max.item(), norm.item()

    @torch.no_grad()
    def validation_loss(self, windows: int | None = None) -> float:
        """Nats per token at the full length."""
        held_out = self._held_out[:: len(self._held_out) // (windows or len(self._held_out))]
        with self._autocast():
            losses = [
                F.cross_entropy(self.model(part[:, :-1]).flatten(0, 1).float(), part[:, 1:].flatten()).item()
                for part in held_out.split(8)
            ]
        return float(np.mean(losses))

    def logits(self) -> tuple[float, float]:
        with self._autocast():
            return largest_logits(self.model, self._held_out[:1, :-1])

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.setting.precision == BF16)


def train(setting: Setting) -> dict[str, Any]:
    """Train the run to its last token, or to the first loss that is not finite, and return its record."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    trainer, before = Trainer(setting), []
    steps: list[tuple[float, ...]] = []
    probes: list[list[float]] = []
    while trainer.tokens < setting.tokens:
        if trainer.tokens >= len(probes) * setting.tokens / PROBES:
            probes.append([trainer.tokens, *trainer.logits()])
        before.append(trainer.tokens)
        steps.append(trainer.step())
        if not math.isfinite(steps[-1][0]):
            break
    final = trainer.validation_loss() if math.isfinite(steps[-1][0]) else math.nan
    probes.append([trainer.tokens, *trainer.logits()])
    columns = dict(zip(_COLUMNS, np.array(steps, dtype=np.float64).T, strict=True))
    seconds = time.perf_counter() - started
    return record_of(setting, columns, np.array(before, dtype=np.float64), final, probes, seconds)


def record_of(
    setting: Setting,
    columns: dict[str, np.ndarray],
    before: np.ndarray,
    final_loss: float,
    probes: list[list[float]],
    seconds: float,
) -> dict[str, Any]:
    """A record in plain JSON. Numbers that are not finite become None."""
    ratios = loss_ratios(columns["loss"])
    finite = ratios[np.isfinite(ratios)]
    final = final_loss if math.isfinite(final_loss) else None
    is_late = before >= setting.lr_warmup * setting.tokens
    figures = {
        "final_loss": final,
        "steps": len(before),
        "spikes": count_spikes(ratios),
        "largest_ratio": float(finite.max()) if len(finite) else None,
        "diverges": diverges(columns["loss"], before, setting.tokens, final),
        "r_l1": _r(columns["variance_l1"], ratios),
        "r_max": _r(columns["variance_max"], ratios),
        "r_l1_after_peak": _r(columns["variance_l1"][is_late], ratios[is_late]),
        "r_max_after_peak": _r(columns["variance_max"][is_late], ratios[is_late]),
        "largest_variance_max": _rounded(np.nanmax(columns["variance_max"]), 6),
        "largest_grad_norm": _rounded(np.nanmax(columns["grad_norm"]), 3),
        "probes": [[int(tokens), _rounded(a, 2), _rounded(b, 3)] for tokens, a, b in probes],
        "curve": list(_curve(columns["loss"], before)),
        "seconds": round(seconds, 1),
    }
    return {"setting": setting.to_json(), "figures": figures}


def _r(x: np.ndarray, y: np.ndarray) -> float | None:
    found = correlation(x, y)
    return None if found is None else round(found.r, 4)


def _rounded(value: float, digits: int) -> float | None:
    return round(float(value), digits) if math.isfinite(value) else None


def _curve(losses: np.ndarray, before: np.ndarray) -> Iterator[list[float | None]]:
    """Tokens, and the smallest and the largest loss of a few neighboring steps."""
    for part in np.array_split(np.arange(len(losses)), min(CURVE_POINTS, len(losses))):
        found = losses[part]
        yield [int(before[part[0]]), _rounded(found.min(), 3), _rounded(found.max(), 3)]
