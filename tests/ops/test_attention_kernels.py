"""Every other implementation of attention against the reference in float64: outputs, lse, gradients."""

from functools import partial

import pytest
import torch

from seqwarm_kernels import alibi_attention, alibi_slopes
from seqwarm_kernels.self_check.calls import RESULTS, differentiate
from tests.support.attention_cases import CASES, DECODING_CASES, SHORT_CASES, check_case
from tests.support.backends import implementations, needs_interpreter, serving
from tests.support.kernels import check_far_positions
from tests.support.tiers import first_fast

pytestmark = pytest.mark.usefixtures("poisoned_memory", "tiles_of_16_bits")
HALF = (torch.float16, torch.bfloat16)
REFERENCE = pytest.param("reference", "cpu", torch.float64, id="reference")
on_everything = pytest.mark.parametrize(("backend", "device", "dtype"), [REFERENCE, *implementations()])

#: Cases that each dtype runs in `make test`, or in the interpreter in `make test-slow`.
FEW_CASES = ["causal", "mask of everything", "mqa", "head_dim 100", "everything"]
#: Those that the interpreter, which takes seconds for each, runs in `make test`. `make test-slow` adds others, and
#: test_attention_triton.py runs a third of the tokens of many.
FAST_IN_INTERPRETER = ["small", "12 tokens, everything", "three queries, dropout"]
SLOW_IN_INTERPRETER = [
    "a slice",
    "head_dim 100",
    "one query",
    "one query, full",
    "two queries, skipped keys",
    *SHORT_CASES,
]


def grid():
    """Every case with every implementation. A case of float16 is that of bfloat16 with other casts."""
    for implementation in [REFERENCE, *implementations()]:
        backend, device, dtype = implementation.values
        for name in CASES:
            marks = [*implementation.marks]
            if (backend, device) == ("triton", "cpu") and name not in FAST_IN_INTERPRETER:
                marks.append(pytest.mark.slow if name in SLOW_IN_INTERPRETER else pytest.mark.exhaustive)
            elif backend == "native" and dtype == torch.float16 and name not in FEW_CASES:
                marks.append(pytest.mark.slow)
            yield pytest.param(backend, device, dtype, name, id=f"{implementation.id}-{name}", marks=marks)


@pytest.mark.parametrize(("backend", "device", "dtype", "name"), list(grid()))
def test_outputs_and_gradients_stay_inside_the_budget(backend, device, dtype, name):
    stretch = 6 if device == "cuda" and name not in SHORT_CASES | DECODING_CASES else 1
    check_case(CASES[name], backend, device, dtype, stretch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=needs_interpreter(dtype=dtype)) for dtype in HALF])
@pytest.mark.parametrize("name", FEW_CASES)
def test_half_precision_in_the_interpreter(dtype, name):
    check_case(CASES[name], "triton", "cpu", dtype)


@on_everything
def test_queries_that_see_no_key_in_a_known_call(backend, device, dtype):
    """A call whose queries all see a key is known before. Not even NaN in the values reaches their gradients."""
    query, key, value = (torch.randn(1, 2, 100, 16).to(device, dtype) for _ in range(3))
    value[:, :, 1] = float("nan")
    for start in (0, -3):
        out = alibi_attention(query.requires_grad_(), key, value, query_start=start, backend=backend)
        gradient = torch.autograd.grad(out.sum(), query)[0]
    assert (gradient[:, :, :3] == 0).all()


@pytest.mark.parametrize("length", [100, 6])
@pytest.mark.parametrize("start", [2**60, 2**45 + 1, -(2**60)])
@pytest.mark.parametrize(("backend", "device", "dtype"), implementations())
@pytest.mark.slow_in_interpreter
def test_positions_far_from_all_keys(backend, device, dtype, start, length):
    check_far_positions(backend, start, length, device, dtype)


@pytest.mark.parametrize(
    ("start", "causal"), first_fast([(5000, True), (256, True), (-300, False)], "slow_in_interpreter")
)
@pytest.mark.parametrize("backend", serving())
def test_gradients_of_slopes_of_queries_far_from_all_keys(backend, start, causal):
    """In float32, as precise as those of queries beside their keys."""
    query, key, value = (torch.randn(2, 4, length, 16) for length in (20, 40, 40))
    weights = torch.randn_like(query), torch.zeros(2, 4, 20)

    def differentiated(leaves, backend):
        attend = partial(alibi_attention, query_start=start, causal=causal, return_lse=True, backend=backend)
        return differentiate(lambda leaves: attend(*leaves), [leaf.requires_grad_() for leaf in leaves], weights)

    leaves = [query, key, value, alibi_slopes(4)]
    exact = differentiated([leaf.double() for leaf in leaves], "reference")
    for what, result, expected in zip(RESULTS, differentiated(leaves, backend), exact, strict=True):
        error = (result - expected).abs().max() / expected.abs().max()
        assert error <= 4e-6, what
