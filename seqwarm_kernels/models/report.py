"""The report of `apply_alibi`."""

from __future__ import annotations

from typing import NamedTuple


class Replaced(NamedTuple):
    """A layer whose attention now has ALiBi."""

    path: str
    module_class: str
    num_heads: int
    causal: bool | None  #: None: each call decides


class Removed(NamedTuple):
    """A source of positions that was removed."""

    path: str
    module_class: str
    num_parameters: int


class Verification(NamedTuple):
    """Measurements of the forward passes of the converted model, over all layers."""

    calls: int  #: number of ALiBi attention calls
    largest_error: float  #: of the outputs against float64, relative to the largest value
    smallest_effect: float  #: of the slopes on the outputs of a layer, relative to the largest value
    largest_position_error: float  #: largest difference of equal tokens, relative to the largest query, key or value
    cache_error: float | None  #: of the last token with a cache, relative to the largest value; None without one


class SurgeryReport(NamedTuple):
    """Modules that `apply_alibi` replaced and removed, and the verification that ALiBi acts."""

    max_seq_length: int
    learn_slopes: bool
    replaced: tuple[Replaced, ...]
    removed: tuple[Removed, ...]
    dropped_from_optimizers: int  #: number of parameters
    verification: Verification | None  #: None for a model on the meta device, which cannot run

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
        if self.verification is None:
            lines.append("not verified: the model is on the meta device")
        else:
            lines.append(
                f"verified in {self.verification.calls} calls: error {self.verification.largest_error:.1e}, effect of "
                f"the slopes at least {self.verification.smallest_effect:.1e}, position error "
                f"{self.verification.largest_position_error:.1e}"
            )
            if self.verification.cache_error is not None:
                lines[-1] += f", cache error {self.verification.cache_error:.1e}"
        return "\n".join(lines)
