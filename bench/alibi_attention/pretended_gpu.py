"""A GPU that compiles Triton's kernels and does not run them: what remains of a call is the work of the host.

Import before torch starts Triton, in a process without TRITON_INTERPRET. Tensors are on the CPU.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.alibi_attention import triton_configurations
from seqwarm_kernels.ops.alibi_attention.triton_configurations import Chip
from seqwarm_kernels.ops.library import LIBRARY

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


class _Driver:
    """What Triton asks of a driver before and in a launch."""

    def __init__(self, chip: int | str) -> None:
        self._chip = chip

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 2**30},
        load_binary=lambda *binary: (object(), object(), 0, 0, 1024),
    )

    def get_current_device(self) -> int:
        """Triton keeps what it compiled for a device."""
        return CHIPS.index(self._chip)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return target_of(self._chip)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: None


def pretend(chip: int | str) -> None:
    """From now on kernels are compiled for `chip`, and `backend="triton"` serves tensors on the CPU."""
    driver.set_active(_Driver(chip))
    setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))  # noqa: B010
    for name in ("triton", "triton_short", "gluon"):
        module = importlib.import_module(f"seqwarm_kernels.ops.alibi_attention.{name}")
        setattr(module, "chip_of", lambda device: described(chip))  # noqa: B010
    importlib.import_module("seqwarm_kernels.ops.alibi_attention.triton")._known.clear()
    _serve()


@functools.cache
def _serve() -> None:
    host = importlib.import_module("seqwarm_kernels.ops.alibi_attention.triton")
    for name, forward, backward in host.OPERATORS:
        LIBRARY.impl(f"{name}.triton", forward, "CPU")
        LIBRARY.impl(f"{name}_backward.triton", backward, "CPU")
    backends._problems.pop("triton", None)
    for name, *_ in host.OPERATORS:
        backends._find_serving(name)
