"""Calls whose key is known equal new ones, in results, gradients, errors, and all that PyTorch sees of them."""

import importlib
import inspect
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import alibi_attention, alibi_attention_varlen
from seqwarm_kernels.attention import attended_share, calls, fast_path
from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.library import short
from tests.support.backends import serving
from tests.support.kernels import CalledOperators
from tests.support.tiers import examples

BACKENDS = serving()
each_backend = pytest.mark.parametrize("backend", BACKENDS)
#: Triton's interpreter takes seconds, and the calls of both are made by the same code.
not_interpreted = pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "triton"])
each_kernel = pytest.mark.parametrize(
    "backend", [backend for backend in BACKENDS if backend != "reference"] or BACKENDS
)


def packed(query, key, value, *slopes, **options):
    """`alibi_attention_varlen` of rows, each of which is one sequence."""
    ends = [torch.arange(len(each) + 1, dtype=torch.int32) * each.shape[2] for each in (query, key)]
    tensors = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    return alibi_attention_varlen(*tensors, *ends, query.shape[2], key.shape[2], *slopes, **options)


dense_and_packed = pytest.mark.parametrize("attend", [alibi_attention, packed])


@pytest.mark.parametrize(
    ("function", "call_type"), [(alibi_attention, calls.DenseCall), (alibi_attention_varlen, calls.VarlenCall)]
)
def test_defaults(function, call_type):
    """Of the public function, and of the calls that other callers make."""
    parameters = inspect.signature(function).parameters
    defaults = {name: parameters[name].default for name in call_type._field_defaults}
    assert defaults == call_type._field_defaults
    assert (defaults["causal"], defaults["dropout_p"], defaults["skip_tolerance"]) == (True, 0, 2**-24)


SHARES = [("check_dense", attended_share.attended_share), ("check_varlen", attended_share.attended_share_varlen)]


@pytest.mark.parametrize(("check", "function"), SHARES)
def test_attended_share_has_the_options_of_attention(monkeypatch, check, function):
    made = []
    monkeypatch.setattr(attended_share, check, lambda call: made.append(call._asdict()) or ())
    monkeypatch.setattr(attended_share, "_attended_share", lambda: None)
    given = {name: index for index, name in enumerate(inspect.signature(function).parameters)}
    function(**given)
    assert {name: made[0][name] for name in given} == given


@st.composite
def calls_of_two_kinds(draw):
    """A call, and one that differs in one argument."""
    heads, length = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
    choices = {
        "token_major": [False, True],
        "offset": [0, 1],  # of the memory, in elements
        "requires_grad": [False, True],
        "slopes": [None, torch.full((heads,), 0.5), torch.full((2, heads), 0.25)],
        "causal": [True, False],
        "scale": [None, 1, 0.5],
        "window": [None, 0, 2],
        "query_start": [None, 0, 2, torch.tensor(1), torch.tensor([0, 2])],
        "key_padding_mask": [None, torch.arange(length + 2).expand(2, -1) < 1],
        "return_lse": [False, True],
    }
    first = {name: draw(st.sampled_from(values)) for name, values in choices.items()}
    name = draw(st.sampled_from(sorted(choices)))
    return [(heads, length, call) for call in (first, {**first, name: draw(st.sampled_from(choices[name]))})]


def inputs(heads, length, token_major, offset, requires_grad):
    tensors = []
    for index, tokens in enumerate((length, length + 2, length + 2)):
        shape = (2, tokens, heads, 4) if token_major else (2, heads, tokens, 4)
        memory = torch.randn(offset + 8 * heads * tokens, generator=torch.Generator().manual_seed(index))
        tensor = memory[offset:].view(shape)
        tensors.append((tensor.transpose(1, 2) if token_major else tensor).requires_grad_(requires_grad))
    return tensors


def forget():
    fast_path._checked_calls.clear()
    if "triton" in BACKENDS:
        importlib.import_module("seqwarm_kernels.ops.alibi_attention.triton")._known.clear()


def results(backend, heads, length, options):
    options = dict(options)
    tensors = inputs(heads, length, *(options.pop(name) for name in ("token_major", "offset", "requires_grad")))
    outputs = alibi_attention(*tensors, backend=backend, **options)
    outputs = outputs if options["return_lse"] else (outputs,)
    if not tensors[0].requires_grad:
        return outputs
    return [*outputs, *torch.autograd.grad(sum(output.nan_to_num(neginf=0).sum() for output in outputs), tensors)]


@each_kernel
@pytest.mark.exhaustive_in_interpreter
@examples(30)
@given(calls=calls_of_two_kinds())
def test_known_calls_equal_new_ones(backend, calls):
    forget()
    known = [results(backend, *call) for call in (*calls, *calls)]
    for call, result in zip((*calls, *calls), known, strict=True):
        forget()
        torch.testing.assert_close(result, results(backend, *call), rtol=0, atol=0)


@not_interpreted
def test_wrong_arguments_of_a_known_kind(backend):
    tensor = torch.randn(1, 1, 2, 8)
    alibi_attention(tensor, tensor, tensor, backend=backend, query_start=1)
    junk = {"causal": 1, "return_lse": 0, "window": True, "backend": "\ud800"}.items()
    for name, value in [*junk, *(("query_start", value) for value in (True, "int", int, 2**60 + 1, 2**63, -(2**70)))]:
        with pytest.raises((TypeError, ValueError), match=f"^{name} must"):
            alibi_attention(tensor, tensor, tensor, **{"backend": backend, "query_start": 1, name: value})
    mask = torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="key_padding_mask"):
        alibi_attention(tensor, tensor, tensor, backend=backend, query_start=1, key_padding_mask=mask)


@not_interpreted
@dense_and_packed
def test_a_growing_query_start_is_one_kind(backend, attend):
    """So that decoding checks its first call alone."""
    query, key = torch.randn(2, 1, 1, 8), torch.randn(2, 1, 9, 8)
    fast_path._checked_calls.clear()
    for start in range(5):
        out = attend(query, key, key, backend=backend, query_start=start)
        torch.testing.assert_close(out, attend(query, key, key, backend="reference", query_start=start))
    assert len(fast_path._checked_calls) == (1 if backend == "reference" else 2)


@not_interpreted
@dense_and_packed
@pytest.mark.parametrize("changed", ["key", "query_start"])
def test_an_input_that_changes_before_backward_is_an_error(backend, attend, changed):
    query, key, start = torch.randn(1, 2, 3, 8, requires_grad=True), torch.randn(1, 2, 3, 8), torch.tensor([0])
    for _ in range(2):  # the second call is a known one
        out = attend(query, key, key, query_start=start, backend=backend)
        (key if changed == "key" else start).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@each_backend
def test_no_tensor_is_kept(backend):
    tensors = [torch.randn(1, 1, 2, 8) for _ in range(3)] + [torch.rand(1)]
    alibi_attention(*tensors, backend=backend)
    gone = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    assert [tensor() for tensor in gone] == [None] * 4


def test_a_call_that_a_graph_captures_is_not_remembered(monkeypatch):
    """Its default slopes lie in the graph's memory."""
    monkeypatch.setattr(fast_path, "is_capturing", lambda device: True)
    tensor = torch.randn(1, 1, 2, 8)
    fast_path._checked_calls.clear()
    alibi_attention(tensor, tensor, tensor)
    assert not fast_path._checked_calls


@not_interpreted
def test_autocast_after_a_call_without(backend):
    tensors = [torch.randn(1, 1, 2, 8) for _ in range(3)]
    assert alibi_attention(*tensors, backend=backend).dtype == torch.float32
    with torch.autocast("cpu", torch.float16):
        assert alibi_attention(*tensors, backend=backend).dtype == torch.float16
        assert alibi_attention(*tensors, backend=backend).dtype == torch.float16
    assert alibi_attention(*tensors, backend=backend).dtype == torch.float32


@not_interpreted
def test_dropout_draws_a_seed_for_each_call(backend):
    tensors = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    first, second = (alibi_attention(*tensors, dropout_p=0.5, backend=backend) for _ in range(2))
    assert not torch.equal(first, second)


@not_interpreted
@dense_and_packed
def test_autograd_of_a_known_call(backend, attend):
    """lse alone, only the slopes, saved-tensor hooks, a second backward, and no second derivative."""

    def call(query, slopes):
        return attend(query, query, query, slopes, return_lse=True, backend=backend)

    query = torch.randn(2, 2, 5, 8, requires_grad=True)
    slopes = torch.rand(2, requires_grad=True)
    out, lse = call(query, slopes)
    expected = torch.autograd.grad(out.sum() + lse.sum(), (query, slopes))
    out, lse = call(query, slopes)
    by_parts = [torch.autograd.grad(part.sum(), (query, slopes), retain_graph=True) for part in (out, lse)]
    for one, *parts in zip(expected, *by_parts, strict=True):
        torch.testing.assert_close(one, sum(parts))
    (alone,) = torch.autograd.grad(sum(part.sum() for part in call(query.detach(), slopes)), slopes)
    torch.testing.assert_close(alone, expected[1])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        out, lse = call(query, slopes)
    torch.testing.assert_close(torch.autograd.grad(out.sum() + lse.sum(), (query, slopes)), expected)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    out, lse = call(query, slopes)
    (once,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        once.sum().backward()
    with torch.no_grad():
        assert not call(query, slopes)[0].requires_grad


@pytest.mark.exhaustive_in_interpreter
@each_kernel
@dense_and_packed
def test_gradients_of_a_known_call_beside_the_reference(backend, attend):
    """Of all inputs, and of each alone. No two tensors and no two numbers are the same."""
    tensors = [torch.randn(2, 2, 5, 8), *torch.randn(2, 2, 2, 7, 8), torch.rand(2)]
    options = {"scale": 0.4, "window": 4, "dropout_p": 0.25, "return_lse": True, "query_start": torch.tensor([0, 1])}
    if attend is alibi_attention:
        options["key_padding_mask"] = torch.arange(7).expand(2, -1) != 1

    def gradients(backend, needed):
        torch.manual_seed(3)
        leaves = [tensor.clone().requires_grad_(index in needed) for index, tensor in enumerate(tensors)]
        out, lse = attend(*leaves, backend=backend, **options)
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        return [*torch.autograd.grad((out * weights).sum() + lse.sum(), [leaves[index] for index in needed])]

    expected = gradients("reference", range(4))
    for needed in (range(4), range(4), *([each] for each in range(4))):
        torch.testing.assert_close(gradients(backend, needed), [expected[index] for index in needed])


def test_compiled_autograd_of_an_eager_forward():
    leaves = [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)]

    def gradients(backward):
        torch.manual_seed(0)
        loss = alibi_attention(*leaves, dropout_p=0.2).sum()
        for leaf in leaves:
            leaf.grad = None
        with backward:
            loss.backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients(nullcontext())
    compiled = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    torch.testing.assert_close(gradients(compiled), expected, rtol=0, atol=0)


@each_backend
def test_the_dispatcher_is_passed_by_only_without_a_mode(backend, monkeypatch):
    """A mode sees the operator. Without one, the module for this torch makes the call, in less time."""
    ways = []
    monkeypatch.setattr(fast_path, "short", lambda *names: ways.append(short(*names)) or ways[-1])
    tensor = torch.randn(1, 1, 2, 8)
    forget()
    with CalledOperators():
        alibi_attention(tensor, tensor, tensor, backend=backend)
    assert not ways
    for _ in range(2):
        alibi_attention(tensor, tensor, tensor, backend=backend)
    (way,) = ways
    assert backend == "reference" or backends.module is None or type(way) is type(backends.module.call_key)


@not_interpreted
def test_a_mode_around_backward_sees_the_operator(backend):
    leaf = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = alibi_attention(leaf, leaf, leaf, backend=backend)
    with CalledOperators() as called:
        out.sum().backward()
    assert f"seqwarm::alibi_attention_backward.{backend}" in called.names


@not_interpreted
def test_below_autograd_no_graph_is_recorded(backend):
    """In the implementation of an operator with an autograd of its own."""
    leaf = torch.randn(1, 2, 4, 8, requires_grad=True)
    for _ in range(2):
        with torch._C._AutoDispatchBelowAutograd():
            out = alibi_attention(leaf, leaf, leaf, backend=backend)
        assert not out.requires_grad


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton does not serve here")
def test_an_error_in_a_python_kernel(monkeypatch):
    from seqwarm_kernels.ops.alibi_attention import triton

    def fail(*arguments):
        raise LookupError("of the kernel")

    leaf = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = alibi_attention(leaf, leaf, leaf, backend="triton")
    for name, call in (
        ("forward", lambda: alibi_attention(leaf, leaf, leaf, backend="triton")),
        ("backward", out.sum().backward),
    ):
        monkeypatch.setattr(triton, name, fail)
        with pytest.raises(LookupError, match="of the kernel"):
            call()


@each_backend
def test_the_profiler_sees_a_known_call(backend):
    leaf, gradients = torch.randn(1, 2, 4, 8, requires_grad=True), []
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            gradients += torch.autograd.grad(alibi_attention(leaf, leaf, leaf, backend=backend).sum(), leaf)
    assert torch.equal(*gradients)
    names = {event.name for event in profile.events()}
    assert {"seqwarm::alibi_attention", "seqwarm::alibi_attention_backward"} <= names


@not_interpreted
def test_a_negative_view_as_gradient_of_lse(backend):
    query = torch.randn(1, 2, 6, 16, requires_grad=True)
    _, lse = alibi_attention(query, query, query, return_lse=True, backend=backend)
    weights = torch.randn(lse.shape)
    got, want = (
        torch.autograd.grad(lse, query, weight, retain_graph=True) for weight in (torch._neg_view(weights), -weights)
    )
    assert torch.equal(*got, *want)


def test_threads():
    tensors = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    expected = alibi_attention(*tensors, backend="native")
    fast_path._checked_calls.clear()
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: alibi_attention(*tensors, backend="native"), range(12)))
    torch.testing.assert_close(got, [expected] * 12, rtol=0, atol=0)


@not_interpreted
def test_batched_gradients(backend):
    leaf = torch.randn(1, 2, 4, 8, requires_grad=True)
    rows = torch.randn(2, 1, 2, 4, 8)
    out = alibi_attention(leaf, leaf, leaf, backend=backend)
    expected = [torch.autograd.grad(out, leaf, row, retain_graph=True)[0] for row in rows]
    (got,) = torch.autograd.grad(out, leaf, rows, is_grads_batched=True)
    torch.testing.assert_close(got, torch.stack(expected))
