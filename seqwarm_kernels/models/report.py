"""What `apply_alibi` did."""

from __future__ import annotations

from typing import NamedTuple


class Replaced(NamedTuple):
    """A layer whose attention has ALiBi now."""

    path: str
    module_class: str
    num_heads: int
    causal: bool | None  #: None where each call says it


class Removed(NamedTuple):
    """A source of positions that is gone."""

    path: str
    module_class: str
    num_parameters: int


class Proof(NamedTuple):
    """What a run of the model after surgery showed, over all layers."""

    calls: int  #: of ALiBi attention
    largest_error: float  #: of the outputs against float64, over the largest value
    smallest_effect: float  #: of the slopes on a layer's outputs, over the largest value: the layer that gains least
    largest_leak: float  #: how far equal tokens differ by their positions, over the largest query, key or value


class SurgeryReport(NamedTuple):
    """What `apply_alibi` replaced and removed, and the proof that ALiBi acts."""

    max_seq_length: int
    learn_slopes: bool
    replaced: tuple[Replaced, ...]
    removed: tuple[Removed, ...]
    dropped_from_optimizers: int  #: parameters
    proof: Proof | None  #: None for a model without memory (on the meta device), which cannot run

    def __str__(self) -> str:
        kinds = sorted({layer.module_class for layer in self.replaced})
        slopes = "learned" if self.learn_slopes else "fixed"
        lines = [
            f"ALiBi with {slopes} slopes in {len(self.replaced)} layers ({', '.join(kinds)}), "
            f"up to {self.max_seq_length} tokens"
        ]
        for source in self.removed:
            lines.append(f"removed {source.path} ({source.module_class}, {source.num_parameters:,} parameters)")
        if self.dropped_from_optimizers:
            lines.append(f"{self.dropped_from_optimizers} parameters dropped from optimizers")
        if self.proof is None:
            lines.append("not probed: the model is on the meta device")
        else:
            lines.append(
                f"probed in {self.proof.calls} calls: error {self.proof.largest_error:.1e}, effect of the slopes at "
                f"least {self.proof.smallest_effect:.1e}, other positions {self.proof.largest_leak:.1e}"
            )
        return "\n".join(lines)
