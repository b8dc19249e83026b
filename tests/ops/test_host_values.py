"""Values of query_start, cu_seqlens and max_seqlen that make no sense: every backend refuses them in every call."""

import pytest
import torch

from seqwarm_kernels import alibi_attention, alibi_attention_varlen
from seqwarm_kernels.attention import fast_path
from seqwarm_kernels.attention.attended_share import attended_share_varlen
from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.alibi_attention import validation
from seqwarm_kernels.ops.alibi_attention.schema import VarlenOptions
from seqwarm_kernels.ops.library import overload
from tests.support.backends import OPERATOR_ERROR

on_each_backend = pytest.mark.parametrize(
    "backend",
    [
        backend
        for backend in backends.BACKENDS
        if backends.why_not("alibi_attention_varlen", backend, "cpu", torch.float32) is None
    ],
)

#: Changes of the arguments of 6 queries and 5 keys.
BAD = [
    ({"cu_seqlens_q": [0, 5, 3]}, "cu_seqlens_q must not decrease, got 3 after 5"),
    ({"cu_seqlens_k": [0, 5, 4]}, "cu_seqlens_k must not decrease, got 4 after 5"),
    ({"cu_seqlens_k": [0, -1, 4]}, "cu_seqlens_k must not decrease, got -1 after 0"),
    ({"cu_seqlens_q": [0, 3, 7]}, "cu_seqlens_q must end within the 6 tokens of query, got 7"),
    ({"cu_seqlens_k": [0, 3, 6]}, "cu_seqlens_k must end within the 5 tokens of key, got 6"),
    ({"cu_seqlens_q": [1, 3, 6]}, "cu_seqlens_q must start with 0, got 1"),
    ({"cu_seqlens_k": [-1, 3, 5]}, "cu_seqlens_k must start with 0, got -1"),
    ({"cu_seqlens_q": [6]}, "cu_seqlens_q must start with 0, got 6"),
    ({"max_seqlen_q": 3}, "max_seqlen_q must be at least 4, the length of the longest sequence, got 3"),
    ({"max_seqlen_k": 0}, "max_seqlen_k must be at least 3, the length of the longest sequence, got 0"),
]

#: Only for the checks: without them, kernels would take all memory.
EXTREME = [
    ({"cu_seqlens_q": [0, -(2**31), 2**31 - 1]}, "cu_seqlens_q must not decrease, got -2147483648 after 0"),
    ({"cu_seqlens_q": [-(2**31), 0, 2**31 - 1]}, "cu_seqlens_q must start with 0, got -2147483648"),
    ({"cu_seqlens_k": [0, 0, 2**31 - 1]}, "cu_seqlens_k must end within the 5 tokens of key, got 2147483647"),
]

GOOD = [
    {},
    {"max_seqlen_q": 4, "max_seqlen_k": 3},
    {"max_seqlen_q": 2**40, "max_seqlen_k": 2**40},
    {"cu_seqlens_q": [0, 0, 6], "cu_seqlens_k": [0, 5, 5]},
    {"cu_seqlens_q": [0, 1, 2], "cu_seqlens_k": [0, 1, 1]},
    {"cu_seqlens_q": [0, 0, 0], "cu_seqlens_k": [0, 0, 0], "max_seqlen_q": 0, "max_seqlen_k": 0},
    {"cu_seqlens_q": [0], "cu_seqlens_k": [0], "max_seqlen_q": 0, "max_seqlen_k": 0},
]


def arguments(changes=(), backend=None, **more):
    given = {"cu_seqlens_q": [0, 2, 6], "cu_seqlens_k": [0, 3, 5], "max_seqlen_q": 6, "max_seqlen_k": 5}
    given |= dict(changes)
    if len(given["cu_seqlens_q"]) == 1:
        given["cu_seqlens_k"] = [0]
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        given[name] = torch.tensor(given[name], dtype=torch.int32)
    made = dict(zip(("query", "key", "value"), (torch.randn(length, 2, 8) for length in (6, 5, 5)), strict=True))
    return {**made, **given, "backend": backend, **more}


def packing(changes):
    made = arguments(changes)
    return [made[name] for name in ("query", "key", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]


@pytest.mark.parametrize(("changes", "message"), BAD + EXTREME)
def test_the_check_with_the_extension_and_without(changes, message):
    for check in (validation._check_packing, validation.check_packing):
        with pytest.raises(ValueError, match=message):
            check(*packing(changes))
        for good in GOOD:
            check(*packing(good))


def needing_gradients(made):
    return {**made, **{name: made[name].requires_grad_() for name in ("query", "key", "value")}}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("changes", "message"), BAD)
@on_each_backend
def test_each_call_is_checked(backend, changes, message, gradients):
    prepare = needing_gradients if gradients else dict
    bad = prepare(arguments(changes, backend))
    fast_path._checked_calls.clear()
    with pytest.raises(ValueError, match=message):
        alibi_attention_varlen(**bad)
    good = {name: bad[name] for name in ("max_seqlen_q", "max_seqlen_k")}
    good |= {name: torch.zeros_like(bad[name]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    alibi_attention_varlen(**{**bad, **good})
    with pytest.raises(ValueError, match=message):  # now a known call
        alibi_attention_varlen(**bad)


@pytest.mark.parametrize("changes", GOOD)
@on_each_backend
def test_legal_values(backend, changes):
    made = needing_gradients(arguments(changes, backend))
    for _ in range(2):
        out = alibi_attention_varlen(**made)
        out.sum().backward()
    expected = alibi_attention_varlen(**{**made, "backend": "reference"})
    torch.testing.assert_close(out, expected)


@on_each_backend
def test_operators_check_what_a_compiled_call_did_not(backend):
    """Values are not known while a call is traced. The operators read them when the compiled call runs."""
    compiled = torch.compile(alibi_attention_varlen, backend="aot_eager", fullgraph=True)
    compiled(**arguments({}, backend))
    with pytest.raises(OPERATOR_ERROR, match="cu_seqlens_k must end within the 5 tokens"):
        compiled(**arguments({"cu_seqlens_k": [0, 3, 9]}, backend))


@pytest.mark.skipif(backends.problem("native") is not None, reason=str(backends.problem("native")))
@pytest.mark.parametrize("tokens", [6, 200])
def test_native_backward_reads_no_token_that_is_not_there(tokens):
    query = torch.randn(tokens, 2, 8)
    good, bad = (torch.tensor([0, 2, end], dtype=torch.int32) for end in (tokens, tokens + 1))
    options = VarlenOptions(good, good, None, tokens, tokens, True, 0.5, None, 0.0, 0.0)
    inputs = query, query, query, torch.rand(2)
    outputs = overload("alibi_attention_varlen", "native")(*inputs, *options)
    with pytest.raises(OPERATOR_ERROR, match="cu_seqlens_q must end within"):
        overload("alibi_attention_varlen_backward", "native")(
            query, None, *outputs, True, *inputs, *options._replace(cu_seqlens_q=bad)
        )


@pytest.mark.skipif(backends.problem("native") is not None, reason=str(backends.problem("native")))
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("changes", "slopes", "message"),
    [
        ({"cu_seqlens_q": 0, "cu_seqlens_k": 0}, (2,), r"same shape \(sequences \+ 1,\), got \[0\] and \[0\]"),
        ({"cu_seqlens_k": 2}, (2,), r"same shape \(sequences \+ 1,\), got \[3\] and \[2\]"),
        ({}, (3, 2), r"slopes must be \(2,\) or \(2, 2\), got \[3, 2\]"),
        ({}, (1,), r"slopes must be \(2,\) or \(2, 2\), got \[1\]"),
    ],
)
def test_native_operators_check_shapes_on_which_reads_depend(changes, slopes, message, backward):
    """Public functions check them, too. An operator may be called without one."""
    query, ends = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    options = VarlenOptions(ends, ends, None, 6, 6, True, 0.5, None, 0.0, 0.0)
    outputs = overload("alibi_attention_varlen", "native")(query, query, query, torch.rand(2), *options)
    options = options._replace(**{name: ends[:count] for name, count in changes.items()})
    inputs = query, query, query, torch.rand(slopes), *options
    if backward:
        operator, inputs = "alibi_attention_varlen_backward", (query, None, *outputs, True, *inputs)
    else:
        operator = "alibi_attention_varlen"
    with pytest.raises(OPERATOR_ERROR, match=message):
        overload(operator, "native")(*inputs)


@pytest.mark.skipif(backends.problem("native") is not None, reason=str(backends.problem("native")))
def test_native_operators_check_the_shape_of_slopes():
    query = torch.randn(3, 2, 4, 8)
    options = (None, None, None, 0, True, 0.5, None, None, 0.0, 0.0)

    def attend(slopes):
        return overload("alibi_attention", "native")(query, query, query, slopes, *options)[0]

    slopes = torch.rand(2)
    assert torch.equal(attend(slopes), attend(slopes.repeat(3, 1)))
    for shape in ((), (3,), (2, 2), (3, 3), (3, 3, 2)):
        with pytest.raises(OPERATOR_ERROR, match=r"slopes must be \(2,\) or \(3, 2\), got"):
            attend(torch.rand(shape))


@pytest.mark.skipif(backends.problem("native") is not None, reason=str(backends.problem("native")))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_native_operators_check_the_number_of_positions(dtype):
    query, starts = torch.randn(3, 2, 4, 8), torch.zeros(2, dtype=dtype)
    options = (starts, None, None, 0, True, 0.5, None, None, 0.0, 0.0)
    with pytest.raises(OPERATOR_ERROR, match="query_start must have one entry, or one for each of the 3 rows, got 2"):
        overload("alibi_attention", "native")(query, query, query, torch.rand(2), *options)


def test_nothing_is_read_without_values():
    meta = {name: value.to("meta") for name, value in arguments().items() if isinstance(value, torch.Tensor)}
    assert alibi_attention_varlen(**arguments() | meta, dropout_p=0.5).is_meta
    with torch._subclasses.FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(value) for name, value in arguments().items() if isinstance(value, torch.Tensor)}
        assert alibi_attention_varlen(**arguments() | fake, dropout_p=0.5).shape == (6, 2, 8)


@on_each_backend
def test_the_share_of_attended_keys_needs_the_same_values(backend):
    with pytest.raises(ValueError, match="cu_seqlens_q must end within the 6 tokens of query, got 7"):
        attended_share_varlen(**arguments({"cu_seqlens_q": [0, 3, 7]}, backend))


FARTHEST = 2**60


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("start", [FARTHEST + 1, -FARTHEST - 1, 2**63 - 1, -(2**63)])
@on_each_backend
def test_positions_are_checked_in_each_call(backend, start, gradients):
    query = torch.randn(2, 2, 3, 8, requires_grad=gradients)

    def attend(start, **options):
        return alibi_attention(query, query, query, query_start=torch.tensor([0, start]), backend=backend, **options)

    fast_path._checked_calls.clear()
    for options in ({}, {"dropout_p": 0.5}):
        for _ in range(2):  # the second call is a known one
            with pytest.raises(ValueError, match=f"query_start must be from -2\\*\\*60 to 2\\*\\*60, got {start}"):
                attend(start, **options)
            attend(1, **options)


@on_each_backend
def test_positions_of_packed_sequences_are_checked_in_each_call(backend):
    fast_path._checked_calls.clear()
    for options in ({}, {"dropout_p": 0.5}):
        made = arguments({}, backend, **options)
        for _ in range(2):  # the second call is a known one
            with pytest.raises(ValueError, match="query_start must be from"):
                alibi_attention_varlen(**made, query_start=torch.tensor([0, 2**60 + 1]))
            alibi_attention_varlen(**made, query_start=torch.tensor([0, 2]))


@pytest.mark.parametrize("start", [FARTHEST, -FARTHEST, torch.iinfo(torch.int32).max, 0])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@on_each_backend
def test_legal_positions(backend, start, dtype):
    if abs(start) <= torch.iinfo(dtype).max:
        query = torch.randn(1, 2, 3, 8)
        for shape in ((), (1,)):
            start_of_rows = torch.full(shape, start, dtype=dtype)
            out = alibi_attention(query, query, query, query_start=start_of_rows, backend=backend)
            assert torch.equal(out, alibi_attention(query, query, query, query_start=start, backend=backend))


@on_each_backend
def test_operators_check_positions_that_a_compiled_call_did_not(backend):
    query = torch.randn(1, 2, 3, 8)
    compiled = torch.compile(alibi_attention, backend="aot_eager", fullgraph=True)
    compiled(query, query, query, query_start=torch.tensor([3]), backend=backend)
    with pytest.raises(OPERATOR_ERROR, match="query_start must be from"):
        compiled(query, query, query, query_start=torch.tensor([2**61]), backend=backend)
