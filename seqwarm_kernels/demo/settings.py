"""The settings of the demo, and their defaults for each kind of machine. Help shows them, so torch loads later."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Settings:
    """All settings that determine the numbers of both runs, which share them."""

    device: str
    steps: int  #: at the full length; the token budget of each run is steps · batch_size · seq_length
    seq_length: int
    batch_size: int
    layers: int
    heads: int
    width: int
    validation_windows: int
    seed: int = 0
    peak_learning_rate: float = 4e-3  #: the best of a few for the baseline on the CPU, with seed 0
    weight_decay: float = 0.1
    learning_rate_warmup: float = 0.05  #: share of the tokens
    length_warmup: float = 0.3  #: share of the tokens
    evaluations: int = 24

    def __post_init__(self) -> None:
        if self.seq_length < 16:  # no room above the minimum length
            raise ValueError(f"seq_length must be at least 16, got {self.seq_length}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of the {self.heads} heads, got {self.width}")

    @property
    def total_tokens(self) -> int:
        """Number of tokens that each run trains on."""
        return self.steps * self.batch_size * self.seq_length

    @property
    def min_seq_length(self) -> int:
        """An eighth of the full length. Shorter lengths would make many more steps, and save little."""
        return max(8, self.seq_length // 64 * 8)

    @property
    def length_step_size(self) -> int:
        return max(8, self.seq_length // 256 * 8)

    def evaluation_points(self) -> list[int]:
        """Numbers of tokens after which both runs are evaluated, from 0 to all, at least one step apart."""
        count = min(self.evaluations, self.steps)
        return [index * self.total_tokens // count for index in range(count + 1)]

    def describe(self) -> str:
        return (
            f"GPT with ALiBi on {self.device}: {self.layers} layers, {self.heads} heads, width {self.width}. "
            f"Two runs of {self.total_tokens:,} tokens (bytes) each, {self.batch_size} rows a batch: full length "
            f"{self.seq_length} throughout, then growing from {self.min_seq_length} over the first "
            f"{self.length_warmup:.0%} of the tokens."
        )


#: Chosen so that both runs together take three to four minutes on 2 cores.
CPU = Settings(
    device="cpu", steps=700, seq_length=256, batch_size=8, layers=3, heads=4, width=128, validation_windows=48
)
GPU = Settings(
    device="cuda",
    steps=800,
    seq_length=1024,
    batch_size=16,
    layers=8,
    heads=8,
    width=512,
    validation_windows=64,
    peak_learning_rate=1e-3,
)
QUICK_CPU = replace(CPU, steps=400, seq_length=128, layers=2, width=96, validation_windows=64, evaluations=16)
QUICK_GPU = replace(GPU, steps=100, evaluations=16)


def settings_for(device: str | None, quick: bool = False, **given: Any) -> Settings:
    """The defaults for this machine, replaced by what is given. None means the default.

    Raises:
        ValueError: a setting is out of range, or there is no such device.
    """
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device must be a device of this machine, got {device!r}") from error
    defaults = (QUICK_GPU if quick else GPU) if device.startswith("cuda") else (QUICK_CPU if quick else CPU)
    return replace(defaults, device=device, **{name: value for name, value in given.items() if value is not None})
