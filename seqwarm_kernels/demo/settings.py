"""The settings of the demo, and their defaults for each kind of machine."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..utils.checks import check_int

#: A shorter full length would leave no room above the minimum length.
SHORTEST_FULL_LENGTH = 16


@dataclass(frozen=True)
class Settings:
    """All settings that determine the numbers of both runs, which share them. Stored in the report folder."""

    device: str
    quick: bool
    steps: int  #: at the full length; the token budget of each run is steps · batch_size · seq_length
    seq_length: int
    batch_size: int
    layers: int
    heads: int
    width: int
    validation_windows: int
    seed: int = 0
    text: tuple[str, ...] = ()  #: files and folders; if empty, Python's standard library
    peak_learning_rate: float = 4e-3  #: the best of a few for the baseline on the CPU, with seed 0
    weight_decay: float = 0.1
    learning_rate_warmup: float = 0.05  #: share of the tokens
    length_warmup: float = 0.3  #: share of the tokens
    evaluations: int = 24
    packing: bool = False  #: train on packed paragraphs instead of windows

    @property
    def total_tokens(self) -> int:
        """Number of tokens that each run trains on."""
        return self.steps * self.batch_size * self.seq_length

    @property
    def min_seq_length(self) -> int:
        """An eighth of the full length. Shorter lengths would make many more steps, and save little."""
        return max(8, _multiple_of_8(self.seq_length // 8))

    @property
    def length_step_size(self) -> int:
        return max(8, _multiple_of_8(self.seq_length // 32))

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.device.startswith("cuda") else None

    def evaluation_points(self) -> list[int]:
        """Numbers of tokens after which both runs are evaluated, from 0 to all, at least one step apart."""
        count = min(self.evaluations, self.steps)
        return [index * self.total_tokens // count for index in range(count + 1)]

    @property
    def batch(self) -> str:
        """A description of the batch."""
        if self.packing:
            return f"packed paragraphs, {self.batch_size * self.seq_length:,} tokens"
        return f"{self.batch_size} rows"

    def describe(self) -> str:
        return (
            f"GPT with ALiBi on {self.device}: {self.layers} layers, {self.heads} heads, width {self.width}. "
            f"Two runs of {self.total_tokens:,} tokens each, {self.batch} a batch: full length "
            f"{self.seq_length} throughout, then growing from {self.min_seq_length} over the first "
            f"{self.length_warmup:.0%} of the tokens."
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Any) -> Settings:
        names = {field.name for field in fields(Settings)}
        if not isinstance(values, dict) or values.keys() != names:
            raise ValueError(f"settings must have the entries {sorted(names)}, got {values!r}")
        return Settings(**{**values, "text": tuple(values["text"])})


#: Chosen so that both runs together take three to four minutes on 2 cores.
CPU = Settings(
    device="cpu",
    quick=False,
    steps=700,
    seq_length=256,
    batch_size=8,
    layers=3,
    heads=4,
    width=128,
    validation_windows=48,
)
CPU_QUICK = replace(
    CPU, quick=True, steps=400, seq_length=128, layers=2, width=96, validation_windows=64, evaluations=16
)
GPU = Settings(
    device="cuda",
    quick=False,
    steps=800,
    seq_length=1024,
    batch_size=16,
    layers=8,
    heads=8,
    width=512,
    validation_windows=64,
    peak_learning_rate=1e-3,
)
GPU_QUICK = replace(GPU, quick=True, steps=100, evaluations=16)

#: By kind of device and quick.
DEFAULTS = {("cpu", False): CPU, ("cpu", True): CPU_QUICK, ("cuda", False): GPU, ("cuda", True): GPU_QUICK}


@dataclass(frozen=True)
class GivenOptions:
    """The options that the user gave. None is replaced by the default."""

    device: str | None = None
    quick: bool | None = None
    steps: int | None = None
    seq_length: int | None = None
    seed: int | None = None
    packing: bool | None = None
    text: tuple[str, ...] | None = None

    @staticmethod
    def from_arguments(arguments: argparse.Namespace) -> GivenOptions:
        options = {field.name: getattr(arguments, field.name) for field in fields(GivenOptions)}
        if options["text"] is not None:  # a run may be resumed from another working directory
            options["text"] = tuple(os.path.abspath(path) for path in options["text"])
        return GivenOptions(**options)

    def complete(self) -> Settings:
        """Returns the defaults for this machine, replaced by the given options."""
        device = _device(self.device)
        kind = device.partition(":")[0]
        settings = replace(DEFAULTS[kind, bool(self.quick)], **{**self._given(), "device": device})
        check_int("--steps", settings.steps, minimum=1)
        check_int("--seq-length", settings.seq_length, minimum=SHORTEST_FULL_LENGTH)
        return settings

    def check_agree(self, settings: Settings, folder: Path) -> None:
        """Raises ValueError if an option differs from the settings of the run to resume."""
        for name, value in self._given().items():
            stored = getattr(settings, name)
            if value != stored:
                option = "--" + name.replace("_", "-")
                raise ValueError(
                    f"{option} is {json.dumps(stored)} in the run in {folder}, got {json.dumps(value)}: "
                    f"leave {option} out to resume that run, or start a new one without --resume"
                )
        _device(settings.device)

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


def _device(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if name != "cpu" and not (kind == "cuda" and (index.isdecimal() or name == "cuda")):
        raise ValueError(f"--device must be cpu, cuda or cuda:INDEX, got {name}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name} does not exist: PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return name


def _multiple_of_8(length: int) -> int:
    return length // 8 * 8
