"""Every other implementation of attention against the reference in float64: outputs, lse, gradients."""

from functools import partial

import pytest
import torch

from seqwarm_kernels import alibi_attention, alibi_slopes
from seqwarm_kernels.self_check.calls import RESULTS, differentiate
from tests.support.attention_cases import CASES, DECODING_CASES, PACKED_CASES, SHORT_CASES, a_third_of, check_case
from tests.support.backends import implementations, serving
from tests.support.tiers import first_fast

pytestmark = pytest.mark.usefixtures("poisoned_memory", "tiles_of_16_bits")
REFERENCE = pytest.param("reference", "cpu", torch.float64, id="reference")
on_everything = pytest.mark.parametrize(("backend", "device", "dtype"), [REFERENCE, *implementations()])
FEW = ["causal", "mask of everything", "mqa", "head_dim 100", "everything"]

#: Cases of `make test`, then those that `make test-slow` adds. Implementations that are not named here run all cases.
#: 16-bit tensors take the code of float32 with other casts, and bulk copies or matrix instructions. The reference
#: equals itself, but must hide what is hidden.
# fmt: off
TIERS = {
    ("reference", torch.float64): ([
        "no keys", "no rows", "segments of nothing", "more queries than keys", "everything", "unused keys, starts",
        "starts", "few tokens", "no sequences",
    ], []),
    ("native", torch.bfloat16): ([
        *FEW, "mask", "segments of 70", "starts in a tensor", "unused keys", "strided dims", "head_dim 5",
        "three queries, dropout", "one query, full", "12 tokens, everything", "segments of 4", "wide dims",
        "many sequences", "many short ones", "starts", "dropout",
    ], [*CASES, *PACKED_CASES]),
    ("native", torch.float16): ([*FEW, "one query", "3 tokens, full", "starts"], []),
    ("triton", torch.float32): ([
        "small", "causal", "everything", "segments of 70", "starts in a tensor", "more queries than keys",
        "negative slopes and scale", "strided dims", "three queries, dropout", "12 tokens, everything",
        "few tokens", "sequences without enough keys", "rows without keys in a tile", "starts",
    ], [
        "full", "window", "window, full", "mask", "dropout", "far more queries than keys, full", "huge slopes",
        "head_dim 5", "head_dim 100", "a slice", "one query", "one query, full", "two queries, skipped keys",
        "segments of 4", "33 tokens, rows without keys", "65 tokens, full", "100 tokens, dropout", "wide dims",
        "unused tokens, window", "far fewer keys", "one query each", "one row far beyond the keys",
        "6 tokens, far beyond the keys", "far before the keys, full",
    ]),
    ("triton", torch.float16): (["causal"], ["full", "everything", "starts"]),
}
# fmt: on


def grid(cases, operator):
    for implementation in [REFERENCE, *implementations(operator)]:
        backend, device, dtype = implementation.values
        fast, slow = TIERS.get((backend, dtype), (cases, [])) if device == "cpu" else (cases, [])
        for name in cases:
            marks = [*implementation.marks] if device == "cuda" else []
            if name not in fast:
                if backend != "triton" and name not in slow:
                    continue
                marks.append(pytest.mark.slow if name in slow else pytest.mark.exhaustive)
            yield pytest.param(backend, device, dtype, name, id=f"{implementation.id}-{name}", marks=marks)


@pytest.mark.parametrize(("backend", "device", "dtype", "name"), list(grid(CASES, "alibi_attention")))
def test_outputs_and_gradients_stay_inside_the_budget(request, backend, device, dtype, name):
    case, is_long = CASES[name], name not in SHORT_CASES | DECODING_CASES
    if (backend, device) == ("triton", "cpu") and is_long and name != "small":
        request.getfixturevalue("small_tiles")
        case = a_third_of(name)
    check_case(case, backend, device, dtype, stretch=6 if device == "cuda" and is_long else 1)


@pytest.mark.parametrize(("backend", "device", "dtype", "name"), list(grid(PACKED_CASES, "alibi_attention_varlen")))
def test_packed_sequences(request, backend, device, dtype, name):
    case, stretch = PACKED_CASES[name], 8 if device == "cuda" else 1
    if (backend, device) == ("triton", "cpu"):
        request.getfixturevalue("small_tiles")
        stretch = 1 / 3 if max(map(sum, case.lengths)) > 50 else 1
    check_case(case, backend, device, dtype, stretch)


@on_everything
def test_queries_that_see_no_key_in_a_known_call(backend, device, dtype):
    """A call whose queries all see a key is known before. Not even NaN in the values reaches their gradients."""
    query, key, value = (torch.randn(1, 1, 40, 16).to(device, dtype) for _ in range(3))
    value[:, :, 1] = float("nan")
    for start in (0, -3):
        out = alibi_attention(query.requires_grad_(), key, value, query_start=start, backend=backend)
        gradient = torch.autograd.grad(out.sum(), query)[0]
    assert (gradient[:, :, :3] == 0).all()


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
