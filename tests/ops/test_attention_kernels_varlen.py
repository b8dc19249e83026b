"""Packed sequences in every other implementation, against the reference in float64."""

import pytest
import torch

from seqwarm_kernels import alibi_attention, alibi_attention_varlen
from tests.support.attention_cases import PACKED_CASES, check_case
from tests.support.backends import implementations
from tests.support.kernels import check_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")

#: Cases that Triton's interpreter, which takes seconds for each, runs in `make test`, and in `make test-slow`.
FAST_IN_INTERPRETER = ["few tokens", "sequences without enough keys"]
SLOW_IN_INTERPRETER = ["empty sequences", "unused tokens", "dropout", "starts", "unused keys", "one query each"]


def grid():
    reference = pytest.param("reference", "cpu", torch.float64, id="reference")
    for implementation in [reference, *implementations("alibi_attention_varlen")]:
        backend, device, dtype = implementation.values
        for name in PACKED_CASES:
            marks = [*implementation.marks]
            if (backend, device) == ("triton", "cpu") and name not in FAST_IN_INTERPRETER:
                marks.append(pytest.mark.slow if name in SLOW_IN_INTERPRETER else pytest.mark.exhaustive)
            yield pytest.param(backend, device, dtype, name, id=f"{implementation.id}-{name}", marks=marks)


@pytest.mark.parametrize(("backend", "device", "dtype", "name"), list(grid()))
def test_outputs_and_gradients_stay_inside_the_budget(backend, device, dtype, name):
    check_case(PACKED_CASES[name], backend, device, dtype, stretch=8 if device == "cuda" else 1)


@pytest.mark.parametrize(("start", "causal"), [(2**60, True), (2**45 + 1, False), (-(2**60), False)])
@pytest.mark.parametrize(("backend", "device", "dtype"), implementations("alibi_attention_varlen"))
@pytest.mark.slow_in_interpreter
def test_positions_far_from_all_keys(backend, device, dtype, start, causal):
    """Equal to the rows of a batch, also in gradients."""
    leaves = [torch.randn(2, 2, 150, 16).to(device, dtype) for _ in range(3)]
    leaves.append(torch.tensor([3 / abs(start), 0.3], device=device))
    options = {"query_start": torch.tensor([start, 3], device=device), "causal": causal, "return_lse": True}
    ends = torch.tensor([0, 150, 300], dtype=torch.int32, device=device)

    def attend(leaves, backend, **changes):
        given = {**options, "backend": backend, **changes}
        if backend == "reference":
            return alibi_attention(*leaves, **given)
        *rows, slopes = leaves
        packed = [row.transpose(1, 2).flatten(0, 1) for row in rows]
        out, lse = alibi_attention_varlen(*packed, ends, ends, 150, 150, slopes, **given)
        return out.unflatten(0, (2, 150)).transpose(1, 2), lse.unflatten(1, (2, 150)).transpose(0, 1)

    check_attention(backend, attend, leaves)
