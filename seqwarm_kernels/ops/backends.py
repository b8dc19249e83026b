"""Which implementations of an operator are available, and which one runs a call.

Every operator `seqwarm::name` has one schema and one overload for each implementation:
`seqwarm::name.reference`, `seqwarm::name.native`, ... The dispatcher knows the devices for which an overload has a
kernel. This module asks the dispatcher once for every operator, when `seqwarm_kernels.ops` is imported.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Mapping

import torch

from ..utils.caller_warnings import warn_caller
from .kernels import load

BACKENDS = ("triton", "native", "reference")
DEVICE_TYPES = ("cuda", "cpu")  # the reference runs on every other device as well

#: Where there are kernels, and the backend that then runs on each device.
PLATFORMS = (("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64"))
EXPECTED = {"cpu": "native", "cuda": "triton"}

#: Triton runs on the CPU only in its interpreter. The interpreter exists for tests and is never the default.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Whether torch is built for AMD's GPUs, whose tensors are of device type "cuda", too.
IS_HIP = torch.version.hip is not None

_Dtypes = tuple[torch.dtype, ...]

_implemented: dict[str, tuple[str, ...]] = {}  # operator -> backends, best first
_lacking: dict[str, dict[str, _Dtypes]] = {}  # operator -> backend -> dtypes without a kernel
_serving: dict[tuple[str, str], tuple[str, ...]] = {}  # (operator, device type) -> backends but the reference
_problems: dict[str, str] = {}  # backend -> why it is not available
_has_warned = False


def is_supported_platform() -> bool:
    """Whether there are kernels for this platform. Elsewhere the reference runs, as it should."""
    return (platform.system(), platform.machine()) in PLATFORMS


kernels = load()  # here, since other modules read `module` when they are imported

#: The module for this torch, where it is built: shorter ways to call kernels.
module = kernels.module

if not is_supported_platform():
    _problems["native"] = f"there are no native kernels for {platform.system()} on {platform.machine()}"
elif kernels.problem is not None:
    _problems["native"] = kernels.problem


def load_triton(*modules: str) -> None:
    """Import the modules that register Triton kernels. On failure, record the reason."""
    if torch.version.cuda is None and not (IS_HIP or _INTERPRETED):
        _problems["triton"] = "Triton's kernels need torch for CUDA or ROCm; its interpreter needs TRITON_INTERPRET=1"
        return
    try:
        importlib.import_module("triton")
    except ImportError as error:
        _problems["triton"] = f"triton is not installed or does not load: {error}"
        return
    for module in modules:
        importlib.import_module(module)


def problem(backend: str) -> str | None:
    """The reason why `backend` is not available on this machine, or None."""
    return _problems.get(backend)


def register(operator: str, implemented: tuple[str, ...], lacking: Mapping[str, _Dtypes] | None = None) -> None:
    """Record the backends of an operator.

    Args:
        operator: name of the operator.
        implemented: its backends, best first.
        lacking: for a backend, the dtypes without a kernel.
    """
    _implemented[operator] = implemented
    _lacking[operator] = dict(lacking or {})
    _find_serving(operator)


def _find_serving(operator: str) -> None:
    for device_type in DEVICE_TYPES:
        _serving[operator, device_type] = tuple(
            backend
            for backend in _implemented[operator]
            if backend != "reference" and why_not(operator, backend, device_type) is None
        )


def operators() -> list[str]:
    return sorted(_implemented)


def why_not(operator: str, backend: str, device_type: str, dtype: torch.dtype | None = None) -> str | None:
    """The reason why `backend` cannot serve `operator` on tensors of `device_type` and `dtype`, or None."""
    if backend not in _implemented[operator]:
        return f"{operator} has no {backend} implementation"
    if backend == "reference":
        return None
    if backend in _problems:
        return _problems[backend]
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"seqwarm::{operator}.{backend}", device_type.upper()):
        return f"{operator} has no {backend} kernel for {device_type} tensors here"
    return _why_not_dtype(operator, backend, device_type, dtype)


def _why_not_dtype(operator: str, backend: str, device_type: str, dtype: torch.dtype | None) -> str | None:
    if dtype in _lacking[operator].get(backend, ()):
        return f"{operator} has no {backend} kernel for {dtype}"
    if dtype == torch.bfloat16 and backend == "triton" and device_type == "cpu":
        return "Triton's interpreter does not multiply bfloat16"
    return None


def choose(operator: str, device_type: str, backend: str | None, dtype: torch.dtype | None = None) -> str:
    """The backend that runs a call: the best available one for None, else exactly `backend`.

    Raises:
        ValueError: `backend` is unknown, or cannot serve `operator` on these tensors.
    """
    if backend is None:
        return _best(operator, device_type, dtype)
    check_backend(backend)
    reason = _why_not_dtype(operator, backend, device_type, dtype)
    if backend not in _serving.get((operator, device_type), ()):
        reason = why_not(operator, backend, device_type)
    if reason is not None:
        raise ValueError(f"backend={backend!r} cannot serve this call: {reason}")
    return backend


def check_backend(backend: object) -> None:
    """`backend` must be the name of a backend, or None."""
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be None or a string, got {type(backend).__name__}")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}, got {backend!r}")


def _best(operator: str, device_type: str, dtype: torch.dtype | None) -> str:
    for backend in _serving.get((operator, device_type), ()):
        interpreted = backend == "triton" and device_type == "cpu"
        if not interpreted and dtype not in _lacking[operator].get(backend, ()):
            return backend
    if device_type == "cpu" and "native" in _problems:
        _warn_of_reference(operator, dtype)
    return "reference"


def _warn_of_reference(operator: str, dtype: torch.dtype | None) -> None:
    """Say once that calls are slow for want of kernels. Dtypes that have none anyway are slow as documented."""
    global _has_warned
    if not _has_warned and is_supported_platform() and dtype not in _lacking[operator].get("native", ()):
        _has_warned = True
        warn_caller(f"{operator} runs in plain PyTorch, many times slower than native kernels: {_problems['native']}")


#: torch's compiler calls it while it traces. As torch.compiler.assume_constant_result says it, without importing the
#: compiler here.
_warn_of_reference._dynamo_marked_constant = True  # type: ignore[attr-defined]
