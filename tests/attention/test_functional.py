"""Errors and warnings of alibi_attention and alibi_attention_varlen."""

import warnings

import pytest
import torch

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, alibi_slopes
from tests.support.backends import needs_native

SHAPES = {"query": (2, 4, 6, 8), "key": (2, 2, 6, 8), "value": (2, 2, 6, 8)}


def dense(**changes):
    given = SHAPES | changes
    return {name: torch.randn(value) if isinstance(value, tuple) else value for name, value in given.items()}


def of_both(*shape):
    return {"key": shape, "value": shape}


#: The error, the argument that it names, and changes of a call.
BAD_DENSE = [
    (TypeError, "query", {"query": None}),
    (ValueError, "query", {"query": (4, 6, 8)}),
    (TypeError, "query", {"query": torch.ones(2, 4, 6, 8, dtype=torch.int64)}),
    *((ValueError, "query", dict.fromkeys(SHAPES, (1, 1, 1, head_dim))) for head_dim in (0, 257)),
    (ValueError, "key", of_both(3, 2, 6, 8)),
    *((ValueError, "query", of_both(2, heads, 6, 8)) for heads in (0, 3)),
    (ValueError, "key", of_both(2, 2, 6, 9)),
    (TypeError, "key", {"key": torch.ones(2, 2, 6, 8).half()}),
    (ValueError, "value", {"value": (2, 2, 7, 8)}),
    (ValueError, "value", {"value": torch.ones(2, 2, 6, 8, device="meta")}),
    *((ValueError, "slopes", {"slopes": shape}) for shape in ((3,), (4, 2))),
    (TypeError, "slopes", {"slopes": torch.tensor([1, 2, 3, 4])}),
    (TypeError, "slopes", {"slopes": [0.5] * 4}),
    (ValueError, "slopes", {"slopes": torch.rand(4, device="meta")}),
    (TypeError, "causal", {"causal": 1}),
    (TypeError, "return_lse", {"return_lse": "yes"}),
    *((ValueError, "scale", {"scale": scale}) for scale in (float("nan"), 1e39)),
    (TypeError, "scale", {"scale": "auto"}),
    (ValueError, "window", {"window": -1}),
    (TypeError, "window", {"window": 2.5}),
    *((ValueError, "dropout_p", {"dropout_p": dropout_p}) for dropout_p in (-0.1, 1.0)),
    (ValueError, "skip_tolerance", {"skip_tolerance": 1}),
    (TypeError, "skip_tolerance", {"skip_tolerance": None}),
    (ValueError, "segment_length", {"segment_length": 0}),
    (ValueError, "query_start", {"segment_length": 4, "query_start": 0}),
    (ValueError, "key", {"segment_length": 2, **of_both(2, 2, 7, 8)}),
    *((TypeError, "query_start", {"query_start": start}) for start in (0.5, torch.tensor(0.5))),
    *((ValueError, "query_start", {"query_start": start}) for start in (torch.tensor([1, 2, 3]), 2**62)),
    (TypeError, "key_padding_mask", {"key_padding_mask": torch.ones(2, 6)}),
    (ValueError, "key_padding_mask", {"key_padding_mask": torch.ones(2, 5, dtype=torch.bool)}),
    (ValueError, "backend", {"backend": "cudnn"}),
]


@pytest.mark.parametrize(("error", "name", "changes"), BAD_DENSE)
def test_bad_arguments(error, name, changes):
    """Also for the reference, which would broadcast."""
    for backend in (None, "reference"):
        with pytest.raises(error, match=f"^{name} "):
            alibi_attention(**{"backend": backend} | dense(**changes))


@needs_native
def test_a_backend_that_lacks_a_dtype_says_so():
    doubles = {name: tensor.double() for name, tensor in dense().items()}
    with pytest.raises(ValueError, match=r"float64"):
        alibi_attention(**doubles, backend="native")
    assert alibi_attention(**doubles).dtype == torch.float64


def ends(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


BAD_VARLEN = [
    (ValueError, "query", {"query": torch.randn(1, 6, 4, 8)}),
    (TypeError, "value", {"value": torch.randn(6, 2, 8).to_sparse()}),
    (TypeError, "cu_seqlens_q", {"cu_seqlens_q": ends(0, 2, 6, dtype=torch.int64)}),
    (TypeError, "cu_seqlens_q", {"cu_seqlens_q": ends(0, 2, 6).to_sparse()}),
    (ValueError, "cu_seqlens_q", {"cu_seqlens_q": ends()}),
    (TypeError, "cu_seqlens_k", {"cu_seqlens_k": [0, 2, 6]}),
    (ValueError, "cu_seqlens_k", {"cu_seqlens_k": ends(0, 6)}),
    (ValueError, "max_seqlen_q", {"max_seqlen_q": -1}),
    (TypeError, "max_seqlen_k", {"max_seqlen_k": None}),
    (ValueError, "slopes", {"slopes": torch.rand(3, 4)}),
    (ValueError, "query_start", {"query_start": torch.tensor([1, 2, 3])}),
    (TypeError, "causal", {"causal": None}),
]


@pytest.mark.parametrize(("error", "name", "changes"), BAD_VARLEN)
def test_bad_arguments_of_packed_sequences(error, name, changes):
    given = {"query": torch.randn(6, 4, 8), "key": torch.randn(6, 2, 8), "value": torch.randn(6, 2, 8)}
    given |= {"cu_seqlens_q": ends(0, 2, 6), "cu_seqlens_k": ends(0, 2, 6), "max_seqlen_q": 4, "max_seqlen_k": 4}
    with pytest.raises(error, match=f"^{name} "):
        alibi_attention_varlen(**given | changes)


@pytest.mark.parametrize("name", ["query", "key", "value", "slopes", "key_padding_mask", "query_start"])
def test_tensors_are_dense(name):
    given = dense(slopes=torch.rand(4), key_padding_mask=torch.ones(2, 6) > 0, query_start=torch.tensor([0, 1]))
    alibi_attention(**given)
    rows = list(given[name].view(2, -1))
    nested = [torch.nested.nested_tensor(rows, layout=layout) for layout in (torch.strided, torch.jagged)]
    for tensor in (given[name].to_sparse(), *nested):
        with pytest.raises(TypeError, match=f"^{name} "):
            alibi_attention(**given | {name: tensor})


def test_positions_made_in_a_compiled_function():
    """The number of rows and of heads is symbolic there, and the number of positions is not."""
    query = torch.randn(2, 6, 3, 8)

    def attend(query):
        return alibi_attention(query, query, query, query_start=torch.tensor([0, 2]))

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(query), attend(query))


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
