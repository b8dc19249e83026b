"""The chips for which kernels are compiled without a GPU."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget

from seqwarm_kernels.ops.alibi_attention import triton_configurations
from seqwarm_kernels.ops.alibi_attention.triton_configurations import Chip

#: AMD's, by the names that its compiler knows.
AMD = {"gfx942": Chip(94, is_hip=True), "gfx950": Chip(95, is_hip=True)}
CHIPS: tuple[int | str, ...] = (*triton_configurations.CHIPS, *AMD)


def named(name: str) -> int | str:
    """90 of "90", and names of AMD's chips as they are."""
    return int(name) if name.isdigit() else name


def described(name: int | str) -> Chip:
    return AMD[name] if isinstance(name, str) else Chip(name)


def target_of(name: int | str) -> GPUTarget:
    """What Triton compiles for."""
    return GPUTarget("hip", name, 64) if isinstance(name, str) else GPUTarget("cuda", name, 32)
