"""The backends of an operator that serve on this machine."""

import pytest
import torch
from hypothesis import HealthCheck

from seqwarm_kernels.ops import backends

#: What an operator raises by itself for wrong arguments: RuntimeError with the library alone and torch 2.15.
OPERATOR_ERROR = (ValueError, RuntimeError) if backends.module is None else ValueError

#: Settings of hypothesis, which warns about fixtures that all examples share. They may, if one names a backend.
SHARES_FIXTURES = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}

needs_native = pytest.mark.skipif(backends.problem("native") is not None, reason=str(backends.problem("native")))


def serving(operator="alibi_attention", dtype=torch.float32):
    """Names of the backends that serve CPU tensors of a dtype."""
    return [name for name in backends.BACKENDS if backends.why_not(operator, name, "cpu", dtype) is None]


def implementations(operator="alibi_attention"):
    """(backend, device, dtype) of every available implementation of attention but the reference.

    In Triton's interpreter, half precision runs the code of float32 with other casts.
    """
    found = []
    for backend in ("triton", "native"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            name = f"{backend}-{str(dtype).removeprefix('torch.')}"
            if backends.why_not(operator, backend, "cpu", dtype) is None:
                marks = [pytest.mark.exhaustive] if backend == "triton" and dtype != torch.float32 else []
                found.append(pytest.param(backend, "cpu", dtype, id=f"{name}-cpu", marks=marks))
            if backend == "triton":
                found.append(pytest.param(backend, "cuda", dtype, id=f"{name}-cuda", marks=pytest.mark.gpu))
    return found


def needs_interpreter(operator="alibi_attention", dtype=torch.float32):
    """Marks tests of Triton's kernels on the CPU."""
    reason = "Triton's interpreter does not serve here"
    return pytest.mark.skipif(backends.why_not(operator, "triton", "cpu", dtype) is not None, reason=reason)


def served(operator, without=None):
    """Parameters (backend, device): all on the CPU, and on a GPU all but the reference. `without` names one to omit."""
    found = []
    for device in backends.DEVICE_TYPES:
        left_out = {without} if device == "cpu" else {without, "reference"}
        for name in backends.BACKENDS:
            if name not in left_out and backends.why_not(operator, name, device) is None:
                marks = [pytest.mark.gpu] if device == "cuda" else []
                found.append(pytest.param((name, device), id=f"{name}-{device}", marks=marks))
    return found


def backend_fixture(operator):
    """A fixture: the name of each backend. The test creates its tensors on its device."""

    @pytest.fixture(params=served(operator))
    def backend(request):
        name, device = request.param
        with torch.device(device):
            yield name

    return backend
