"""Runs the calls on every backend of this machine."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from tqdm import tqdm

from ..ops import backends
from ..utils.progress import standard_error
from .calls import CALLS
from .exact import Comparison

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class CheckedBackend:
    """The calls of one operator by one backend, on one device and in one dtype."""

    operator: str
    device: str
    backend: str
    dtype: str
    calls: int
    worst_share: float  #: the largest error, as a share of its budget
    worst: str  #: where
    mismatches: list[str]


def devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def check_backends(names: Collection[str]) -> Iterator[CheckedBackend]:
    """Check the named backends where they run."""
    served = [
        (operator, device, backend, dtype)
        for operator, device, backend, dtype in product(CALLS, devices(), names, _DTYPES)
        if backends.why_not(operator, backend, device, dtype) is None
    ]
    for where in tqdm(served, desc="comparing", leave=False, file=standard_error()):
        yield check_backend(*where)


def expected_backends() -> list[str]:
    """The backends that this machine should have."""
    return [backends.EXPECTED[device] for device in devices()] if backends.is_supported_platform() else []


def missing_backends(names: Collection[str]) -> dict[str, str]:
    """The named backends that do not run every operator on some device here, each with a reason."""
    missing: dict[str, str] = {}
    for operator in CALLS:
        for backend in names:
            reasons = [backends.why_not(operator, backend, device) for device in devices()]
            if all(reasons):
                missing.setdefault(backend, str(reasons[-1]))
    return missing


def check_backend(operator: str, device: str, backend: str, dtype: torch.dtype) -> CheckedBackend:
    """Run all calls. An error in a call is a mismatch, and the others still run."""
    shares, mismatches = [(0.0, "")], []
    for name, call in CALLS[operator].items():
        torch.manual_seed(0)
        try:
            found = list(call.compare(backend, device, dtype))
        except Exception as error:
            mismatches.append(f"{name}: {type(error).__name__}: {error}")
            continue
        shares += [(_share(comparison), f"{name}, {comparison.name}") for comparison in found]
        mismatches += [f"{name}: {comparison}" for comparison in found if not comparison.within()]
    share, worst = max(shares)
    dtype_name = str(dtype).removeprefix("torch.")
    return CheckedBackend(operator, device, backend, dtype_name, len(CALLS[operator]), share, worst, mismatches)


def _share(comparison: Comparison) -> float:
    return comparison.error / comparison.budget if comparison.budget else comparison.error
