"""Every other implementation of attention against the reference in float64: outputs, lse, gradients."""

import pytest
import torch

from seqwarm_kernels import alibi_attention
from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.alibi_attention.reference import _dense_pairs, forward
from seqwarm_kernels.ops.alibi_attention.schema import DenseOptions
from tests.support.attention_cases import CASES, options_of, slopes_of, tensors_of
from tests.support.kernels import assert_within_budget, slack

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


on_everything = pytest.mark.parametrize(("backend", "device", "dtype"), list(implementations()))


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """torch.empty returns NaN, so an element that a kernel does not write becomes visible."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def eager_attention(query, key, value, slopes, seed_state, options):
    """Plain PyTorch with every step in the inputs' dtype. Uses the reference's dropout mask."""
    torch.manual_seed(seed_state)
    dropout_p = options.get("dropout_p", 0.0)
    start = options.get("query_start", key.shape[2] - query.shape[2])
    tensor_start = start.view(-1) if isinstance(start, torch.Tensor) else None
    dense = DenseOptions(
        query_start=tensor_start,
        key_padding_mask=options.get("key_padding_mask"),
        dropout_seed=torch.randint(2**63 - 1, (), dtype=torch.int64, device=query.device) if dropout_p else None,
        query_offset=0 if tensor_start is not None else start,
        causal=options.get("causal", True),
        scale=options.get("scale", query.shape[-1] ** -0.5),
        segment_length=options.get("segment_length"),
        window=options.get("window"),
        dropout_p=dropout_p,
        skip_tolerance=0.0,
    )
    pairs = _dense_pairs(query, key, dense)
    pairs = type(pairs)(
        pairs.distance.to(query.dtype), pairs.visible, None if pairs.keep is None else pairs.keep.to(query.dtype)
    )
    return forward(query, key, value, slopes.to(query.dtype), pairs, dense.scale)


def differentiate(out, lse, leaves, weights, lse_weights):
    seen = lse.isfinite()
    objective = (out * weights.to(out.dtype)).sum() + (lse * lse_weights.to(lse.dtype))[seen].sum()
    return torch.autograd.grad(objective, leaves, allow_unused=True, materialize_grads=True)


def as_leaves(tensors, dtype):
    return [tensor.detach().clone().to(dtype).requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("name", CASES)
@on_everything
def test_outputs_and_gradients_stay_inside_the_budget(backend, device, dtype, name):
    check_case(backend, device, dtype, name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["causal", "mask of everything", "mqa", "head_dim 100", "everything"])
def test_half_precision_in_the_interpreter(dtype, name):
    if (reason := backends.why_not("alibi_attention", "triton", "cpu", dtype)) is not None:
        pytest.skip(reason)
    check_case("triton", "cpu", dtype, name)


def check_case(backend, device, dtype, name):
    case, stretch = CASES[name], 1 if device == "cpu" else 6
    views = tensors_of(case, device, dtype, stretch)
    slopes = slopes_of(case, device)
    options = options_of(case, device, stretch)

    def attend(tensors, slopes, backend):
        torch.manual_seed(5)
        return alibi_attention(*tensors, slopes, return_lse=True, skip_tolerance=0, backend=backend, **options)

    out, lse = attend(views, slopes, backend)
    assert out.dtype == dtype
    weights, lse_weights = torch.randn_like(out), torch.randn_like(lse)
    gradients = differentiate(out, lse, [*views, slopes], weights, lse_weights)

    exact_leaves = as_leaves([*views, slopes], torch.float64)
    exact, exact_lse = attend(exact_leaves[:3], exact_leaves[3], "reference")
    wanted = differentiate(exact, exact_lse, exact_leaves, weights, lse_weights)
    eager_leaves = as_leaves([*views, slopes], dtype)
    eager, eager_lse = eager_attention(*eager_leaves, 5, options)
    eager_gradients = differentiate(eager, eager_lse, eager_leaves, weights, lse_weights)
    single = as_leaves([*views, slopes], torch.float32)
    _, single_lse = eager_attention(*single, 5, options)

    seen = exact_lse.isfinite()
    times = slack(backend, device) if dtype == torch.float32 else 2
    assert (lse.isfinite() == seen).all()
    assert (lse[~seen] == float("-inf")).all()
    assert_within_budget("lse", lse[seen], exact_lse[seen], single_lse[seen], torch.float32, times)
    names = ("out", "grad_query", "grad_key", "grad_value", "grad_slopes")
    for what, got, want, plain in zip(
        names, (out, *gradients), (exact, *wanted), (eager, *eager_gradients), strict=True
    ):
        assert_within_budget(what, got, want, plain, dtype, times)

    if (backend, device) == ("triton", "cpu"):
        return  # the interpreter runs one program after another
    again = attend(views, slopes, backend)
    assert torch.equal(again[0], out), "the same inputs gave other bits"
    assert torch.equal(again[1], lse)
    for first, second in zip(gradients, differentiate(*again, [*views, slopes], weights, lse_weights), strict=True):
        assert torch.equal(first, second), "the same inputs gave other bits"
