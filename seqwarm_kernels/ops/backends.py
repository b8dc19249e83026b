"""Which implementations of an operator exist here, and which one serves a call.

Every operator `seqwarm::name` has one schema and one overload for each implementation:
`seqwarm::name.reference`, `seqwarm::name.native`, ... The dispatcher knows for which devices each of them
has a kernel; this module asks it once for every operator, when `seqwarm_kernels.ops` is imported.
"""

from __future__ import annotations

import importlib

import torch

BACKENDS = ("triton", "native", "reference")  # best first
DEVICE_TYPES = ("cuda", "cpu")  # the reference serves every other device as well

_implemented: dict[str, tuple[str, ...]] = {}
_serving: dict[tuple[str, str], tuple[str, ...]] = {}  # (operator, device type) -> backends, best first
_extension_problem: str | None = None


def load_extension() -> None:
    """Import the compiled extension, which registers its kernels, or note why that is not possible."""
    global _extension_problem
    try:
        extension = importlib.import_module("seqwarm_kernels._C")
    except ModuleNotFoundError:
        _extension_problem = (
            "the extension seqwarm_kernels._C is not built; where there is a C++ compiler, "
            "`pip install --no-build-isolation .` builds it"
        )
    except ImportError as error:
        _extension_problem = f"the extension seqwarm_kernels._C does not load: {error}"
    else:
        built_for = extension.build_info()["torch"]
        if built_for != torch.__version__:
            _extension_problem = (
                f"the extension was built for torch {built_for}, this is torch {torch.__version__}: rebuild it"
            )


def extension_problem() -> str | None:
    """Why the compiled extension is not in use, or None."""
    return _extension_problem


def register(operator: str, implemented: tuple[str, ...]) -> None:
    """Note which of the `implemented` backends of `operator` have a kernel for which device."""
    _implemented[operator] = implemented
    for device_type in DEVICE_TYPES:
        _serving[operator, device_type] = tuple(
            backend for backend in BACKENDS if why_not(operator, backend, device_type) is None
        )


def operators() -> list[str]:
    return sorted(_implemented)


def why_not(operator: str, backend: str, device_type: str) -> str | None:
    """Why `backend` cannot serve `operator` on tensors of `device_type`; None where it can."""
    if backend not in _implemented[operator]:
        return f"{operator} has no {backend} implementation"
    if backend == "reference":
        return None
    if backend == "native" and _extension_problem is not None:
        return _extension_problem
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"seqwarm::{operator}.{backend}", device_type.upper()):
        return None
    return f"{operator} has no {backend} kernel for {device_type} tensors here"


def choose(operator: str, device_type: str, backend: str | None) -> str:
    """The backend that serves a call: the best there is for None, else exactly the one asked for.

    Raises:
        ValueError: `backend` is unknown, or cannot serve `operator` on tensors of `device_type`.
    """
    serving = _serving.get((operator, device_type), ("reference",))
    if backend is None:
        return serving[0]
    if backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend not in serving:
        reason = why_not(operator, backend, device_type)
        raise ValueError(f"backend={backend!r} cannot serve this call: {reason}")
    return backend
