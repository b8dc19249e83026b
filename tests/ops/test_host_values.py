"""Values of query_start, cu_seqlens and max_seqlen that make no sense: every backend refuses them in every call."""

from itertools import product

import pytest
import torch

from seqwarm_kernels import alibi_attention, alibi_attention_varlen
from seqwarm_kernels.attention import fast_path
from seqwarm_kernels.attention.attended_share import attended_share_varlen
from seqwarm_kernels.ops.alibi_attention import validation
from seqwarm_kernels.ops.alibi_attention.schema import DenseOptions, VarlenOptions
from seqwarm_kernels.ops.library import overload
from tests.support.backends import OPERATOR_ERROR, needs_native, serving

on_each_backend = pytest.mark.parametrize("backend", serving("alibi_attention_varlen"))

#: The argument that is named, and changes of the arguments of 6 queries and 5 keys.
BAD = [
    ("cu_seqlens_q", {"cu_seqlens_q": [0, 5, 3]}),
    ("cu_seqlens_k", {"cu_seqlens_k": [0, -1, 4]}),
    ("cu_seqlens_q", {"cu_seqlens_q": [0, 3, 7]}),
    ("cu_seqlens_k", {"cu_seqlens_k": [0, 3, 6]}),
    ("cu_seqlens_q", {"cu_seqlens_q": [1, 3, 6]}),
    ("cu_seqlens_k", {"cu_seqlens_k": [-1, 3, 5]}),
    ("cu_seqlens_q", {"cu_seqlens_q": [6]}),
    ("max_seqlen_q", {"max_seqlen_q": 3}),
    ("max_seqlen_k", {"max_seqlen_k": 0}),
]

#: Only for the checks: without them, kernels would take all memory.
EXTREME = [
    ("cu_seqlens_q", {"cu_seqlens_q": [0, -(2**31), 2**31 - 1]}),
    ("cu_seqlens_k", {"cu_seqlens_k": [0, 0, 2**31 - 1]}),
]

GOOD = [
    {},
    {"max_seqlen_q": 4, "max_seqlen_k": 3},
    {"max_seqlen_q": 2**40, "max_seqlen_k": 2**40},
    {"cu_seqlens_q": [0, 0, 6], "cu_seqlens_k": [0, 5, 5]},
    {"cu_seqlens_q": [0, 0, 0], "cu_seqlens_k": [0, 0, 0], "max_seqlen_q": 0, "max_seqlen_k": 0},
    {"cu_seqlens_q": [0], "cu_seqlens_k": [0], "max_seqlen_q": 0, "max_seqlen_k": 0},
]


def arguments(changes=(), backend=None, **more):
    given = {"cu_seqlens_q": [0, 2, 6], "cu_seqlens_k": [0, 3, 5], "max_seqlen_q": 6, "max_seqlen_k": 5} | dict(changes)
    if len(given["cu_seqlens_q"]) == 1:
        given["cu_seqlens_k"] = [0]
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        given[name] = torch.tensor(given[name], dtype=torch.int32)
    made = dict(zip(("query", "key", "value"), (torch.randn(length, 2, 8) for length in (6, 5, 5)), strict=True))
    return {**made, **given, "backend": backend, **more}


def arguments_with_gradients(changes=(), backend=None):
    made = arguments(changes, backend)
    return {**made, **{name: made[name].requires_grad_() for name in ("query", "key", "value")}}


NAMES = ("query", "key", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def packing(changes):
    return [arguments(changes)[name] for name in NAMES]


@pytest.mark.parametrize(("name", "changes"), BAD + EXTREME)
def test_the_check_with_the_extension_and_without(name, changes):
    for check in (validation._check_packing, validation.check_packing):
        with pytest.raises(ValueError, match=name):
            check(*packing(changes))
        for good in GOOD:
            check(*packing(good))


@pytest.mark.exhaustive_in_interpreter
@pytest.mark.parametrize(("name", "changes"), BAD)
@on_each_backend
def test_each_call_is_checked(backend, name, changes):
    for make in (arguments, arguments_with_gradients):
        bad = make(changes, backend)
        empty = {each: torch.zeros_like(bad[each]) for each in ("cu_seqlens_q", "cu_seqlens_k")}
        fast_path._checked_calls.clear()
        for _ in range(2):  # the second call is a known one
            with pytest.raises(ValueError, match=name):
                alibi_attention_varlen(**bad)
            alibi_attention_varlen(**bad | empty)


@pytest.mark.exhaustive_in_interpreter
@pytest.mark.parametrize("changes", GOOD)
@on_each_backend
def test_legal_values(backend, changes):
    made = arguments_with_gradients(changes, backend)
    out = alibi_attention_varlen(**made)
    out.sum().backward()
    expected = alibi_attention_varlen(**{**made, "backend": "reference"})
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "backend", [*serving("alibi_attention_varlen"), pytest.param("native by the stable ABI", marks=needs_native)]
)
def test_operators_check_what_a_call_did_not(backend):
    """Values are not known while a call is traced. The operators read them when the compiled call runs."""
    stable = backend == "native by the stable ABI"
    packed, dense = (
        validation.with_checked_values(name) if stable else overload(name, backend)
        for name in ("alibi_attention_varlen", "alibi_attention")
    )
    query, key, *bounds = packing({"cu_seqlens_k": [0, 3, 9]})
    options = VarlenOptions(*bounds[:2], None, *bounds[2:], True, 0.5, None, 0.0, 0.0)
    with pytest.raises(OPERATOR_ERROR, match="cu_seqlens_k"):
        packed(query, key, key, torch.rand(2), *options)
    options = DenseOptions(torch.tensor([2**61]), None, None, 0, True, 0.5, None, None, 0.0, 0.0)
    query = torch.randn(1, 2, 3, 8)
    with pytest.raises(OPERATOR_ERROR, match="query_start must be from"):
        dense(query, query, query, torch.rand(2), *options)


def test_a_compiled_call_is_checked():
    compiled = torch.compile(alibi_attention_varlen, backend="aot_eager", fullgraph=True)
    compiled(**arguments())
    with pytest.raises(OPERATOR_ERROR, match="cu_seqlens_k"):
        compiled(**arguments({"cu_seqlens_k": [0, 3, 9]}))


def test_nothing_is_read_without_values():
    with torch._subclasses.FakeTensorMode() as mode:
        for convert in (lambda tensor: tensor.to("meta"), mode.from_tensor):
            given = arguments()
            made = {name: convert(each) if isinstance(each, torch.Tensor) else each for name, each in given.items()}
            assert alibi_attention_varlen(**made, dropout_p=0.5).shape == (6, 2, 8)


@on_each_backend
def test_the_share_of_attended_keys_needs_the_same_values(backend):
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        attended_share_varlen(**arguments({"cu_seqlens_q": [0, 3, 7]}, backend))


FARTHEST = 2**60


@pytest.mark.exhaustive_in_interpreter
@pytest.mark.parametrize("start", [FARTHEST + 1, -(2**63)])
@on_each_backend
def test_positions_are_checked_in_each_call(backend, start):
    query = torch.randn(2, 2, 3, 8)
    dense = {"query": query, "key": query, "value": query, "backend": backend}
    leaf = query.clone().requires_grad_()
    calls = [(alibi_attention, dense), (alibi_attention, dense | {"query": leaf, "key": leaf, "value": leaf})]
    calls += [(alibi_attention_varlen, make((), backend)) for make in (arguments, arguments_with_gradients)]
    fast_path._checked_calls.clear()
    for (attend, inputs), dropout_p in product(calls, (0.0, 0.5)):
        for _ in range(2):  # the second call is a known one
            with pytest.raises(ValueError, match="query_start"):
                attend(**inputs, query_start=torch.tensor([0, start]), dropout_p=dropout_p)
            attend(**inputs, query_start=torch.tensor([0, 1]), dropout_p=dropout_p)
