"""Every setting of a run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from seqwarm_kernels import SequenceLengthScheduler

#: What the batches of a run are while it is young. `rows` windows of `seq_length` tokens are a full batch.
BASELINE = "baseline"  #: full batches throughout
WARMUP = "warmup"  #: sequence-length warmup: each window is truncated, as in the paper
CONSTANT = "constant tokens"  #: sequence-length warmup: each window is cut into several rows, and no token is lost
SHORT = "short rows"  #: full batches throughout, whose windows are cut into rows of `min_seq_length` tokens
BATCH = "batch warmup"  #: fewer windows of the full length: about as many tokens in a step as WARMUP has, at least one
KINDS = (BASELINE, WARMUP, CONSTANT, SHORT, BATCH)

PRE, POST = "pre", "post"  #: layer norm before each branch, or after the residual sum
FP32, BF16 = "fp32", "bf16"  #: bf16: autocast of products and attention; weights and optimizer stay float32


@dataclass(frozen=True)
class Setting:
    """One run. Shares are of all tokens."""

    rate: float  #: peak of the learning rate
    seed: int = 0
    kind: str = BASELINE
    duration: float = 0.0  #: share until the full length or batch
    layers: int = 6
    width: int = 64
    heads: int = 2
    norm: str = PRE
    precision: str = FP32
    seq_length: int = 512
    min_seq_length: int = 64
    rows: int = 4
    tokens: int = 200_000
    beta2: float = 0.999
    clip: float = 0.0  #: largest norm of the gradients; 0: no clipping
    lr_warmup: float = 0.05  #: share until the peak

    @property
    def name(self) -> str:
        """What differs from the defaults, for a file's name and for people."""
        given = [f"{field.name}={getattr(self, field.name)}" for field in fields(self) if self._differs(field)]
        return ",".join(given).replace(" ", "-")

    def _differs(self, field: Any) -> bool:
        return field.name in ("rate", "seed") or getattr(self, field.name) != field.default

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def scheduler(self) -> SequenceLengthScheduler:
        """Counts tokens. For BATCH, its length over the full one is the share of the rows."""
        return SequenceLengthScheduler(
            self.min_seq_length, self.seq_length, duration=round(self.duration * self.tokens), unit="token"
        )

    def shape(self, length: int) -> tuple[int, int]:
        """Rows and tokens of a row of a batch, when the scheduler is at `length`."""
        if self.kind == BATCH:
            return max(1, round(self.rows * length / self.seq_length)), self.seq_length
        if self.kind == SHORT:
            length = self.min_seq_length
        is_cut = self.kind in (SHORT, CONSTANT)
        return self.rows * (self.seq_length // length if is_cut else 1), length

    def steps_to_peak(self) -> int:
        """Steps until the learning rate is at its peak."""
        scheduler, steps = self.scheduler(), 0
        while scheduler.progress < self.lr_warmup * self.tokens:
            scheduler.step(math.prod(self.shape(scheduler.seq_length)))
            steps += 1
        return steps

    def learning_rate(self, tokens: int) -> float:
        """Linear to the peak, then a cosine to a tenth of the peak. By tokens, and so the same for every kind."""
        ramp = self.lr_warmup * self.tokens
        if tokens < ramp:
            return self.rate * tokens / ramp
        way = min(1.0, (tokens - ramp) / (self.tokens - ramp))
        return self.rate * (0.1 + 0.9 * (1 + math.cos(math.pi * way)) / 2)
