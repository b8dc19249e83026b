"""Sizes and grids of the experiments, for 2 CPU cores and for one large GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Sizes and grids of all experiments. Tokens are those of the BPE that the script trains."""

    name: str
    size: str  #: of the model, as a flag of the script
    device: str
    precision: str
    vocab_size: int
    seq_length: int
    min_seq_length: int
    step_size: int
    batch_size: int  #: sequences at the full length in one optimizer step
    micro_batch_size: int
    total_tokens: int
    validations: int  #: of a timed run; most others have four
    validation_tokens: int
    learning_rates: tuple[float, ...]  #: of the sweep
    lr_warmup_shares: tuple[float, ...]  #: of the sweep: shares of all tokens until the peak
    sweep_seeds: int
    durations: tuple[float, ...]  #: shares of the tokens; the first is the baseline
    duration: float  #: of warmup in experiments that do not vary it
    learning_rate_factors: tuple[int, ...]
    batch_factors: tuple[int, ...]
    stability_seeds: int
    ramp_min_seq_length: int  #: of the ramp whose speed is measured
    ramp_step_size: int
    attentions: tuple[str, ...]  #: besides this package's
    speed_repeats: int
    last_words: int  #: largest number of held-out paragraphs
    one_half_batch: bool = False  #: train the baseline with half the batch with seed 0 only
    extrapolate_timed: bool = False  #: (c) reuses the baseline and the best duration of (a)
    compile: bool = False  #: torch.compile of each block


TOY = Scale(
    name="toy",
    size="toy",
    device="cpu",
    precision="fp32",
    vocab_size=1024,
    seq_length=256,
    min_seq_length=32,
    step_size=8,
    batch_size=8,
    micro_batch_size=8,
    total_tokens=600_000,
    validations=20,
    validation_tokens=2**15,
    learning_rates=(2e-3, 4e-3, 8e-3, 1.6e-2),
    lr_warmup_shares=(0.05, 0.17),
    sweep_seeds=2,
    durations=(0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9),
    duration=0.3,
    learning_rate_factors=(1, 2, 4, 8),
    batch_factors=(1, 4),
    stability_seeds=1,
    ramp_min_seq_length=8,
    ramp_step_size=8,
    attentions=("eager", "flex"),
    speed_repeats=3,
    last_words=1000,
)

#: Not yet run. Planned for half an hour: 23 runs, under 20 minutes in all at 0.7 M tokens per second.
H200 = Scale(
    name="h200",
    size="52m",
    device="cuda",
    precision="bf16",
    vocab_size=16_384,
    seq_length=1024,
    min_seq_length=64,
    step_size=8,
    batch_size=32,
    micro_batch_size=32,
    total_tokens=24_000_000,
    validations=10,
    validation_tokens=2**18,
    learning_rates=(6e-4, 1.2e-3, 2.4e-3),
    lr_warmup_shares=(0.1,),
    sweep_seeds=1,
    durations=(0.0, 0.3, 0.6, 0.9),
    duration=0.3,
    learning_rate_factors=(1, 4),
    batch_factors=(1,),
    stability_seeds=1,
    ramp_min_seq_length=128,
    ramp_step_size=128,
    attentions=("eager", "flex"),
    speed_repeats=2,
    last_words=2000,
    one_half_batch=True,
    extrapolate_timed=True,
)

SCALES = {scale.name: scale for scale in (TOY, H200)}
