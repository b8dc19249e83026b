"""Errors and warnings of alibi_attention and alibi_attention_varlen, and their messages."""

import warnings

import pytest
import torch

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, alibi_slopes
from seqwarm_kernels.ops import backends


def tensors(**changes):
    given = {"query": (2, 4, 6, 8), "key": (2, 2, 6, 8), "value": (2, 2, 6, 8), **changes}
    return [torch.randn(shape) if isinstance(shape, tuple) else shape for shape in given.values()]


BAD_TENSORS = [
    ({"query": None}, TypeError, "query must be a tensor, got NoneType"),
    ({"query": (4, 6, 8)}, ValueError, r"query must be \(batch, heads, length, head_dim\), got shape \(4, 6, 8\)"),
    ({"key": (3, 2, 6, 8), "value": (3, 2, 6, 8)}, ValueError, "key must have the query's batch size 2, got 3"),
    ({"key": (2, 3, 6, 8), "value": (2, 3, 6, 8)}, ValueError, "4 query heads and 3 key heads"),
    ({"key": (2, 0, 6, 8), "value": (2, 0, 6, 8)}, ValueError, "4 query heads and 0 key heads"),
    ({"value": (2, 2, 7, 8)}, ValueError, r"value must have the key's shape \(2, 2, 6, 8\), got \(2, 2, 7, 8\)"),
    ({"key": (2, 2, 6, 9), "value": (2, 2, 6, 9)}, ValueError, "key must have the query's head_dim 8, got 9"),
    (
        {"query": (1, 1, 1, 257), "key": (1, 1, 1, 257), "value": (1, 1, 1, 257)},
        ValueError,
        "query must have a head_dim from 1 to 256, got 257",
    ),
    (
        {"query": (1, 1, 1, 0), "key": (1, 1, 1, 0), "value": (1, 1, 1, 0)},
        ValueError,
        "query must have a head_dim from 1 to 256, got 0",
    ),
    ({"query": torch.ones(2, 4, 6, 8, dtype=torch.int64)}, TypeError, "query must be float32, .* got torch.int64"),
    (
        {"key": torch.ones(2, 2, 6, 8).half()},
        TypeError,
        "key must have the query's dtype torch.float32, got torch.float16",
    ),
    ({"value": torch.ones(2, 2, 6, 8, device="meta")}, ValueError, "value must be on the query's device cpu, got meta"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_TENSORS)
def test_bad_tensors(changes, error, message):
    """Also for the reference, which would broadcast."""
    for backend in (None, "reference"):
        with pytest.raises(error, match=message):
            alibi_attention(*tensors(**changes), backend=backend)


BAD_OPTIONS = [
    ({"slopes": torch.rand(3)}, ValueError, r"slopes must be \(4,\) or \(2, 4\): .* got \(3,\)"),
    ({"slopes": torch.rand(4, 2)}, ValueError, r"got \(4, 2\)"),
    ({"slopes": torch.tensor([1, 2, 3, 4])}, TypeError, "slopes must be a floating-point tensor, got torch.int64"),
    ({"slopes": [0.5] * 4}, TypeError, "slopes must be a floating-point tensor, got list"),
    ({"slopes": torch.rand(4, device="meta")}, ValueError, "slopes must be on the query's device cpu, got meta"),
    ({"causal": 1}, TypeError, "causal must be True or False, got 1"),
    ({"return_lse": "yes"}, TypeError, "return_lse must be True or False, got 'yes'"),
    ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    ({"scale": 1e39}, ValueError, "scale must fit float32, got 1e[+]39"),
    ({"scale": "auto"}, TypeError, "scale must be a real number, got str"),
    ({"window": -1}, ValueError, "window must be at least 0, got -1"),
    ({"window": 2.5}, TypeError, "window must be an int, got float"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
    ({"dropout_p": -0.1}, ValueError, r"dropout_p must be in \[0, 1\), got -0.1"),
    ({"skip_tolerance": 1}, ValueError, r"skip_tolerance must be in \[0, 1\), got 1"),
    ({"skip_tolerance": None}, TypeError, "skip_tolerance must be a real number"),
    ({"segment_length": 0}, ValueError, "segment_length must be at least 1, got 0"),
    ({"segment_length": -8}, ValueError, "segment_length must be at least 1, got -8"),
    ({"segment_length": 4, "query_start": 0}, ValueError, "query_start must be None with segment_length"),
    ({"query_start": 0.5}, TypeError, "query_start must be an int, got float"),
    ({"query_start": torch.tensor(0.5)}, TypeError, "query_start must be an int or an int32 or int64 tensor"),
    ({"query_start": torch.tensor([1, 2, 3])}, ValueError, "one for each of the 2 rows"),
    ({"key_padding_mask": torch.ones(2, 6)}, TypeError, "key_padding_mask must be a bool tensor, .* got torch.float32"),
    (
        {"key_padding_mask": torch.ones(2, 5, dtype=torch.bool)},
        ValueError,
        r"key_padding_mask must be \(batch, key_length\) \(2, 6\), got \(2, 5\)",
    ),
    ({"backend": "cudnn"}, ValueError, "backend must be None or one of triton, native, reference, got 'cudnn'"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        alibi_attention(*tensors(), **options)


@pytest.mark.skipif(backends.problem("native") is not None, reason="the kernels are not built")
def test_a_backend_that_lacks_a_dtype_says_so():
    doubles = [tensor.double() for tensor in tensors()]
    with pytest.raises(ValueError, match=r"backend='native' cannot serve .* no native kernel for torch\.float64"):
        alibi_attention(*doubles, backend="native")
    assert alibi_attention(*doubles).dtype == torch.float64


def test_segments_need_as_many_keys_as_queries():
    with pytest.raises(ValueError, match="key must be as long as query with segment_length, got 6 queries and 7 keys"):
        alibi_attention(*tensors(key=(2, 2, 7, 8), value=(2, 2, 7, 8)), segment_length=2)


def varlen(**changes):
    arguments = {
        "query": torch.randn(6, 4, 8),
        "key": torch.randn(6, 2, 8),
        "value": torch.randn(6, 2, 8),
        "cu_seqlens_q": torch.tensor([0, 2, 6], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 2, 6], dtype=torch.int32),
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    }
    return alibi_attention_varlen(**{**arguments, **changes})


BAD_VARLEN = [
    ({"query": torch.randn(1, 6, 4, 8)}, ValueError, r"query must be \(tokens, heads, head_dim\)"),
    ({"cu_seqlens_q": torch.tensor([0, 2, 6])}, TypeError, "cu_seqlens_q must be an int32 tensor, got torch.int64"),
    ({"cu_seqlens_k": [0, 2, 6]}, TypeError, "cu_seqlens_k must be an int32 tensor, got list"),
    (
        {"cu_seqlens_k": torch.tensor([0, 6], dtype=torch.int32)},
        ValueError,
        "cu_seqlens_k must describe as many sequences",
    ),
    (
        {"cu_seqlens_q": torch.tensor([0, 2, 6], dtype=torch.int32).to_sparse()},
        TypeError,
        "cu_seqlens_q must be a dense tensor, got layout torch.sparse_coo",
    ),
    ({"value": torch.randn(6, 2, 8).to_sparse()}, TypeError, "value must be a dense tensor"),
    ({"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}, ValueError, r"cu_seqlens_q must be \(batch \+ 1,\)"),
    ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be at least 0, got -1"),
    ({"max_seqlen_k": None}, TypeError, "max_seqlen_k must be an int, got NoneType"),
    ({"slopes": torch.rand(3, 4)}, ValueError, r"slopes must be \(4,\) or \(2, 4\)"),
    ({"query_start": 0.5}, TypeError, "query_start must be an int, got float"),
    ({"query_start": torch.tensor([1, 2, 3])}, ValueError, "one for each of the 2 sequences"),
    (
        {"query_start": torch.tensor([1, 2]).float()},
        TypeError,
        "query_start must be an int or an int32 or int64 tensor",
    ),
    ({"window": -2}, ValueError, "window must be at least 0"),
    ({"causal": None}, TypeError, "causal must be True or False"),
]


@pytest.mark.parametrize("name", ["query", "key", "value", "slopes", "key_padding_mask", "query_start"])
def test_tensors_are_dense(name):
    query, key, value = tensors()
    given = {"query": query, "key": key, "value": value, "slopes": torch.rand(4)}
    given |= {"key_padding_mask": torch.ones(2, 6, dtype=torch.bool), "query_start": torch.tensor([0, 1])}
    alibi_attention(**given)
    with pytest.raises(TypeError, match=f"{name} must be a dense tensor, got layout torch.sparse_coo"):
        alibi_attention(**{**given, name: given[name].to_sparse()})
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(list(given[name].view(2, -1)), layout=layout)
        with pytest.raises(TypeError, match=f"{name} must be a dense tensor, got a nested tensor"):
            alibi_attention(**{**given, name: nested})


@pytest.mark.parametrize(("changes", "error", "message"), BAD_VARLEN)
def test_bad_varlen(changes, error, message):
    with pytest.raises(error, match=message):
        varlen(**changes)


def test_positions_made_in_a_compiled_function():
    """The number of rows is symbolic there, and the number of positions is not."""
    query = torch.randn(2, 4, 3, 8)

    def attend(query):
        return alibi_attention(query, query, query, query_start=torch.tensor([0, 2]))

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query), attend(query))


@pytest.mark.parametrize(
    ("ends", "longest", "message"),
    [
        ([0, 8, 20], 12, "cu_seqlens_q must end within the 12 tokens of query, got 20"),
        ([0, 12, 8], 12, "cu_seqlens_q must not decrease, got 8 after 12"),
        ([4, 8, 12], 12, "cu_seqlens_q must start with 0, got 4"),
        ([0, 8, 12], 4, "max_seqlen_q must be at least 8, the length of the longest sequence, got 4"),
    ],
)
def test_boundaries_of_no_packed_sequences(ends, longest, message):
    """Those of another batch, lengths in place of boundaries, or the length of another batch's longest sequence."""
    query = torch.randn(12, 2, 8, requires_grad=True)
    good, bad = (torch.tensor(values, dtype=torch.int32) for values in ([0, 2, 4], ends))
    alibi_attention_varlen(query, query, query, good, good, longest, longest).sum().backward()
    with pytest.raises(ValueError, match=message):  # a known call
        alibi_attention_varlen(query, query, query, bad, bad, longest, longest)


def test_positions_in_a_tensor_have_the_bounds_of_an_int():
    """A position of 2**62 was taken for 2**60."""
    query = torch.randn(1, 2, 3, 8)
    for start in (torch.tensor(2**62), 2**62):
        with pytest.raises(ValueError, match=r"query_start must be from -2\*\*60 to 2\*\*60, got 4611686018427387904"):
            alibi_attention(query, query, query, query_start=start)


@pytest.mark.parametrize(
    ("shape", "warns"),
    [((1, 129, 2, 8), True), ((1, 128, 2, 8), False), ((1, 2, 129, 8), False), ((1, 129, 129, 8), False)],
)
def test_tokens_before_heads(shape, warns):
    query = torch.randn(shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alibi_attention(query, query, query)
        alibi_attention(query, query, query, alibi_slopes(shape[1]))
    assert [str(warning.message) for warning in caught] == warns * [
        "query (1, 129, 2, 8) has 129 heads of 2 tokens; if it is (batch, length, heads, head_dim), transpose query, "
        "key and value, else pass slopes"
    ]
    assert all(warning.filename == __file__ for warning in caught)
