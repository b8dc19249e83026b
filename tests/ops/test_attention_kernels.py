"""Every other implementation of attention against the reference in float64: outputs, lse, gradients."""

from functools import partial

import pytest
import torch

from seqwarm_kernels import alibi_attention, alibi_slopes
from seqwarm_kernels.ops import backends
from seqwarm_kernels.self_check.calls import RESULTS, differentiate
from tests.support.attention_cases import CASES, options_of, slopes_of, tensors_of
from tests.support.dense import distance_and_visibility
from tests.support.kernels import Exact, check_nan_is_unseen

pytestmark = pytest.mark.usefixtures("poisoned_memory")
HALF = (torch.float16, torch.bfloat16)


def implementations(operator="alibi_attention"):
    """(backend, device, dtype) of every available implementation. On a GPU in every dtype, at real sizes.

    In Triton's interpreter, half precision runs the code of float32 with other casts.
    """
    for backend in ("triton", "native"):
        for dtype in (torch.float32, *HALF):
            name = f"{backend}-{str(dtype).removeprefix('torch.')}"
            if backends.why_not(operator, backend, "cpu", dtype) is None:
                marks = [pytest.mark.exhaustive] if backend == "triton" and dtype in HALF else []
                yield pytest.param(backend, "cpu", dtype, id=f"{name}-cpu", marks=marks)
            if backend == "triton":
                yield pytest.param(backend, "cuda", dtype, id=f"{name}-cuda", marks=pytest.mark.gpu)


def exact_results(attend, leaves, weights, **options):
    """The same of the reference in float64."""

    def compute(tensors):
        return differentiate(attend, [tensor.requires_grad_() for tensor in tensors], weights)

    return Exact(compute, leaves, **options)


def check_results(exact, results, dtype):
    exact.check(RESULTS, results, (dtype, torch.float32, dtype, dtype, dtype, dtype))


#: Those that half precision runs in `make test`, or in the interpreter in `make test-slow`.
FEW_CASES = ["causal", "mask of everything", "mqa", "head_dim 100", "everything"]


def cases():
    """Every case with every implementation. A case of float16 is that of bfloat16 with other casts."""
    for implementation in implementations():
        backend, _, dtype = implementation.values
        for name in CASES:
            is_slow = backend == "native" and dtype == torch.float16 and name not in FEW_CASES
            marks = [*implementation.marks, *([pytest.mark.slow] if is_slow else [])]
            yield pytest.param(*implementation.values, name, id=f"{implementation.id}-{name}", marks=marks)


@pytest.mark.parametrize(("backend", "device", "dtype", "name"), list(cases()))
def test_outputs_and_gradients_stay_inside_the_budget(backend, device, dtype, name):
    check_case(backend, device, dtype, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", FEW_CASES)
def test_half_precision_in_the_interpreter(dtype, name):
    if (reason := backends.why_not("alibi_attention", "triton", "cpu", dtype)) is not None:
        pytest.skip(reason)
    check_case("triton", "cpu", dtype, CASES[name])


def check_case(backend, device, dtype, case):
    stretch = 1 if device == "cpu" else 6
    leaves = [*tensors_of(case, device, dtype, stretch), slopes_of(case, device)]
    options = options_of(case, device, stretch)

    def attend(tensors, backend="reference"):
        torch.manual_seed(5)
        return alibi_attention(*tensors, return_lse=True, skip_tolerance=0, backend=backend, **options)

    query = leaves[0]
    weights = torch.randn(query.shape, device=device), torch.randn(query.shape[:-1], device=device)
    results = differentiate(partial(attend, backend=backend), leaves, weights)
    assert results[0].dtype == dtype
    exact = exact_results(attend, leaves, weights, rounds_scores=case.mask == "suffix")
    check_results(exact, results, dtype)
    hidden = ~exact.results[1].isfinite()
    assert (results[1][hidden] == float("-inf")).all()

    if (backend, device) == ("triton", "cpu"):
        return  # the interpreter runs one program after another
    again = differentiate(partial(attend, backend=backend), leaves, weights)
    for what, first, second in zip(RESULTS, results, again, strict=True):
        assert torch.equal(first, second), f"the same inputs gave other bits of {what}"


#: Options with which the first three queries of the first row see no key.
BLIND_QUERIES = {
    "offset": lambda length: {"query_start": -3},
    "tensor": lambda length: {"query_start": torch.tensor([-3, 0])},
    "window": lambda length: {"query_start": -5, "window": 2, "causal": False},
    "mask": lambda length: {"key_padding_mask": torch.arange(length) >= torch.tensor([[3], [0]])},
}


@pytest.mark.parametrize("length", [100, 6])
@pytest.mark.parametrize("name", BLIND_QUERIES)
@pytest.mark.parametrize(
    ("backend", "device", "dtype"), [("reference", "cpu", torch.float64), *implementations()], ids=str
)
def test_queries_that_see_no_key_may_hold_nan(backend, device, dtype, name, length):
    """And so may the gradients of their outputs: they add nothing to the gradient of any key."""
    options = {
        option: value.to(device) if isinstance(value, torch.Tensor) else value
        for option, value in BLIND_QUERIES[name](length).items()
    }
    leaves = [torch.randn(2, heads, length, 16).to(device, dtype) for heads in (2, 1, 1)]
    leaves.append(torch.tensor([0.5, 0.1], device=device))
    weights = torch.randn_like(leaves[0]), torch.randn(2, 2, length, device=device)

    def attend(tensors):
        return alibi_attention(*tensors, **options, return_lse=True, backend=backend)

    every_query_sees = partial(alibi_attention, return_lse=True, backend=backend)  # a kind of call that is kept
    differentiate(
        lambda tensors: every_query_sees(*tensors), [leaf.clone().requires_grad_() for leaf in leaves], weights
    )
    blind = torch.zeros(2, 1, length, 1, dtype=torch.bool, device=device)
    blind[0, :, :3] = True
    check_nan_is_unseen(attend, leaves, weights, queries=blind)


@pytest.mark.parametrize("length", [100, 6])
@pytest.mark.parametrize(
    ("backend", "device", "dtype"), [("reference", "cpu", torch.float64), *implementations()], ids=str
)
def test_queries_that_see_no_key_have_no_gradient_beside_values_that_are_nan(backend, device, dtype, length):
    query, key, value = (torch.randn(1, 2, length, 16).to(device, dtype) for _ in range(3))
    value[:, :, 1] = float("nan")
    out = alibi_attention(query.requires_grad_(), key, value, query_start=-3, backend=backend)
    gradient = torch.autograd.grad(out.sum(), query)[0]
    assert (gradient[:, :, :3] == 0).all()


#: Queries, keys, and options with which no query sees some of the keys, as those in the unused slots of a cache.
HIDDEN_KEYS = {
    "few tokens": (5, 11, {"query_start": 3}),
    "queries before the last keys": (6, 6, {"query_start": -2}),
    "a tile": (70, 200, {"query_start": 45}),
    "another start for each row": (70, 200, {"query_start": torch.tensor([45, 99])}),
    "window on both sides": (70, 250, {"query_start": 101, "window": 30, "causal": False}),
    "no query sees a key": (70, 90, {"query_start": -70}),
    "one query": (1, 600, {"query_start": 290}),
    "few queries": (3, 600, {"query_start": torch.tensor([290, 40]), "window": 33}),
    "mask": (40, 130, {"query_start": 45, "key_padding_mask": torch.arange(130) % 3 > 0}),
}


@pytest.mark.parametrize("name", HIDDEN_KEYS)
@pytest.mark.parametrize(
    ("backend", "device", "dtype"), [("reference", "cpu", torch.float64), *implementations()], ids=str
)
def test_keys_that_no_query_sees_may_hold_nan(backend, device, dtype, name):
    query_length, key_length, options = HIDDEN_KEYS[name]
    if "key_padding_mask" in options:
        options = options | {"key_padding_mask": options["key_padding_mask"].expand(2, key_length)}
    unseen = ~distance_and_visibility(2, query_length, key_length, **options)[1].any(1)[:, None, :, None]
    options = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    shapes = (2, query_length), (1, key_length), (1, key_length)
    leaves = [torch.randn(2, *shape, 16).to(device, dtype) for shape in shapes]
    leaves.append(torch.tensor([0.5, 0.01], device=device))
    weights = torch.randn_like(leaves[0]), torch.randn(2, 2, query_length, device=device)

    def attend(tensors):
        return alibi_attention(*tensors, **options, return_lse=True, backend=backend)

    results = check_nan_is_unseen(attend, leaves, weights, keys=unseen.to(device))
    for gradient in results[3:5]:
        assert (gradient.cpu()[unseen.expand_as(gradient)] == 0).all()


@pytest.mark.parametrize("length", [100, 6])
@pytest.mark.parametrize("start", [2**60, 2**45 + 1, -(2**60)])
@pytest.mark.parametrize(("backend", "device", "dtype"), list(implementations()))
def test_positions_far_from_all_keys(backend, device, dtype, start, length):
    query, key, value = (torch.randn(1, 2, length, 16).to(device, dtype) for _ in range(3))
    slopes = torch.tensor([3 / abs(start), 0.0], device=device)
    for query_start in (start, torch.tensor(start, device=device)):
        for causal in (True, False):
            options = {"causal": causal, "query_start": query_start, "return_lse": True}
            results = alibi_attention(query, key, value, slopes, backend=backend, **options)
            exact = alibi_attention(*(tensor.double() for tensor in (query, key, value, slopes)), **options)
            for result, expected in zip(results, exact, strict=True):
                torch.testing.assert_close(result.double(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(("start", "causal"), [(256, True), (5000, True), (-300, False)])
@pytest.mark.parametrize("backend", ["reference", "native", "triton"])
def test_gradients_of_slopes_of_queries_far_from_all_keys(backend, start, causal):
    """In float32, as precise as those of queries beside their keys."""
    if (reason := backends.why_not("alibi_attention", backend, "cpu", torch.float32)) is not None:
        pytest.skip(reason)
    query, key, value = (torch.randn(2, 4, length, 16) for length in (20, 40, 40))
    weights = torch.randn_like(query), torch.randn(2, 4, 20)

    def differentiated(dtype, backend):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (query, key, value, alibi_slopes(4))]
        attend = partial(alibi_attention, query_start=start, causal=causal, return_lse=True, backend=backend)
        return differentiate(lambda tensors: attend(*tensors), leaves, [weights[0], torch.zeros_like(weights[1])])

    found, exact = differentiated(torch.float32, backend), differentiated(torch.float64, "reference")
    for what, result, expected in zip(RESULTS, found, exact, strict=True):
        error = (result - expected).abs().max() / expected.abs().max()
        assert error <= 4e-6, what
