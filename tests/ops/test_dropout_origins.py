"""A part of a call draws the dropout mask of the whole: seeds and origins of each head, in every backend."""

from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch

from seqwarm_kernels.attention.calls import DenseCall, VarlenCall, check_dense, check_varlen
from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.alibi_attention.dropout import dropout_origins, keep_mask
from seqwarm_kernels.self_check.calls import RESULTS, differentiate
from tests.support.kernels import Exact

pytestmark = pytest.mark.usefixtures("poisoned_memory")
WHOLE = slice(None)


def implementations():
    """(backend, device, dtype)"""
    for backend, dtype in [
        ("reference", torch.float64),
        ("native", torch.float32),
        ("native", torch.bfloat16),
        ("triton", torch.float32),
    ]:
        if backends.why_not("alibi_attention", backend, "cpu", dtype) is None:
            yield pytest.param(backend, "cpu", dtype, id=f"{backend}-{dtype}-cpu")
    for dtype in (torch.float32, torch.bfloat16):
        yield pytest.param("triton", "cuda", dtype, id=f"triton-{dtype}-cuda", marks=pytest.mark.gpu)


on_every_implementation = pytest.mark.parametrize(("backend", "device", "dtype"), list(implementations()))


def run(operator, tensors, options):
    out, lse, *_ = operator(*tensors, *options)
    return out, lse


def results_of(attend, leaves):
    """Outputs and gradients of attend(leaves), of fixed random weights."""
    generator = torch.Generator().manual_seed(2)
    query, *_, lse_shape = leaves[0], attend(leaves)[1].shape
    weights = [torch.randn(shape, generator=generator).to(query.device) for shape in (query.shape, lse_shape)]
    return differentiate(attend, [leaf.detach().requires_grad_() for leaf in leaves], weights)


def check_parts(attend_whole, attend_in_parts, leaves):
    """The parts against the whole, by the reference in float64."""
    results = results_of(attend_in_parts, leaves)
    exact = Exact(partial(results_of, attend_whole), leaves)
    dtype = leaves[0].dtype
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    exact.check(RESULTS, results, (dtype, lse_dtype, dtype, dtype, dtype, dtype))


def draw_origins(shape, device):
    """Any seeds, heads and firsts whose counters fit into 32 bits."""
    seed = torch.randint(-(2**63), 2**63 - 1, shape)
    head, first_query = torch.randint(2**32, shape), torch.randint(2**32 - 1000, shape)
    first_key = 4 * torch.randint(2**32 - 1000, shape)
    return torch.stack((seed, head, first_query, first_key), -1).to(device)


def expected_mask(origins, num_queries, num_keys):
    seed, head, first_query, first_key = origins.cpu()[..., None, None, :].unbind(-1)
    return keep_mask(
        0.3, seed, head, first_query + torch.arange(num_queries)[:, None], first_key + torch.arange(num_keys)
    )


def one_hot_values(num_keys, width=128):
    """(keys, width) values that show which weights are not 0: those of `width` keys at a time."""
    for first in range(0, num_keys, width):
        values = torch.zeros(num_keys, width)
        inside = values[first : first + width]
        inside.fill_diagonal_(1)
        yield values, len(inside)


# ---- dense


class Part(NamedTuple):
    """Indices of the whole call."""

    batch: slice = WHOLE
    key_heads: slice = WHOLE
    queries: slice = WHOLE
    keys: slice = WHOLE


class Case(NamedTuple):
    parts: list[Part]
    options: dict[str, Any]
    lengths: tuple[int, int] = (70, 90)
    batch_size: int = 2
    heads: tuple[int, int] = (4, 2)
    masked: bool = False


HEADS = [Part(key_heads=slice(0, 1)), Part(key_heads=slice(1, 2))]
CASES = {
    "segments that share tiles": Case(
        [Part(queries=slice(0, 8), keys=slice(0, 8)), Part(queries=slice(8, 16), keys=slice(8, 16))],
        {"segment_length": 8},
        (16, 16),
        batch_size=3,
    ),
    "rows that share tiles": Case(
        [Part(slice(0, 2)), *(Part(slice(2, 5), part.key_heads) for part in HEADS)], {}, (12, 12), batch_size=5
    ),
    "queries": Case(
        [Part(queries=slice(0, 36), keys=slice(0, 56)), Part(queries=slice(36, 70), keys=slice(36, 90))],
        {"window": 20},
    ),
    "heads, mask": Case(
        [Part(slice(0, 1)), Part(slice(1, 2), slice(0, 1)), Part(slice(1, 2), slice(1, 2))],
        {"causal": False},
        (70, 70),
        masked=True,
    ),
    "one query": Case([HEADS[0], Part(key_heads=slice(1, 2), keys=slice(36, 600))], {"window": 560}, (1, 600)),
    "four queries": Case(
        [Part(queries=slice(0, 1)), Part(queries=slice(1, 4), keys=slice(36, 600))],
        {"window": 559},
        (4, 600),
        masked=True,
    ),
}


def inputs_of(case, device, dtype):
    """Tensors, and the options of the whole call."""
    (queries, keys), (heads, key_heads) = case.lengths, case.heads
    shapes = (heads, queries), (key_heads, keys), (key_heads, keys)
    tensors = [torch.randn(case.batch_size, *shape, 16, device=device).to(dtype) for shape in shapes]
    options = dict(case.options)
    if case.masked:
        options["key_padding_mask"] = torch.rand(case.batch_size, keys, device=device) < 0.7
    return [*tensors, torch.rand(heads, device=device)], options


def attend_dense(tensors, options, dropout_seed, backend):
    call = DenseCall(*tensors, dropout_p=0.3, skip_tolerance=0, backend=backend, **options)
    operator, tensors, options = check_dense(call)
    return run(operator, tensors, options._replace(dropout_seed=dropout_seed))


def attend_parts(tensors, options, seed, backend, parts):
    """The call in parts, each with the origins of its tokens and heads."""
    query, key, value, slopes = tensors
    batch_size, num_heads, query_length, _ = query.shape
    group = num_heads // key.shape[1]
    out = torch.zeros_like(query)
    lse = torch.zeros(query.shape[:-1], device=query.device, dtype=torch.promote_types(query.dtype, torch.float32))
    for part in parts:
        first_query, first_key = part.queries.start or 0, part.keys.start or 0
        heads = WHOLE if part.key_heads == WHOLE else slice(group * part.key_heads.start, group * part.key_heads.stop)
        own = dict(options)
        if "key_padding_mask" in own:
            own["key_padding_mask"] = own["key_padding_mask"][part.batch, part.keys]
        if "segment_length" not in own:
            own["query_start"] = key.shape[2] - query_length + first_query - first_key
        origins = dropout_origins(seed, batch_size, num_heads, first_query, first_key)[part.batch, heads]
        rows = part.batch, heads, part.queries
        of_keys = part.batch, part.key_heads, part.keys
        out[rows], lse[rows] = attend_dense(
            (query[rows], key[of_keys], value[of_keys], slopes[heads]), own, origins, backend
        )
    return out, lse


@pytest.mark.parametrize("name", CASES)
@on_every_implementation
def test_a_part_draws_the_mask_of_the_whole(backend, device, dtype, name):
    leaves, options = inputs_of(CASES[name], device, dtype)
    seed = torch.tensor(2**62 + 77, device=device)

    def in_parts(tensors):
        return attend_parts(tensors, options, seed, backend, CASES[name].parts)

    def whole(tensors):
        return attend_dense(tensors, options, seed, "reference")

    check_parts(whole, in_parts, leaves)


@pytest.mark.parametrize(("batch_size", "lengths"), [(5, (12, 12)), (2, (35, 150)), (2, (3, 520))])
@on_every_implementation
def test_mask_of_any_origins(backend, device, dtype, batch_size, lengths):
    query, key = (torch.zeros(batch_size, 2, length, 128, device=device, dtype=dtype) for length in lengths)
    origins, slopes = draw_origins((batch_size, 2), device), torch.zeros(2, device=device)
    masks = []
    for values, width in one_hot_values(lengths[1]):
        value = values.to(key).expand_as(key)
        out, _ = attend_dense((query, key, value, slopes), {"causal": False}, origins, backend)
        masks.append(out[..., :width] != 0)
    assert torch.equal(torch.cat(masks, -1).cpu(), expected_mask(origins, *lengths))


# ---- packed sequences


#: Lengths of queries and of keys. The second part begins with the third sequence.
PACKED = {
    "sequences that share tiles": ([5, 20, 8, 30], [12, 20, 8, 30]),
    "long sequences": ([90, 7, 0, 72], [93, 3, 4, 101]),
}


def attend_packed(tensors, lengths, dropout_seed, backend):
    device = tensors[0].device
    ends = [torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device) for each in lengths]
    options = {"causal": False, "dropout_p": 0.3, "skip_tolerance": 0, "backend": backend}
    operator, tensors, checked = check_varlen(VarlenCall(*tensors, *ends, *map(max, lengths), **options))
    return run(operator, tensors, checked._replace(dropout_seed=dropout_seed))


def packed_inputs(lengths, device, dtype):
    shapes = (sum(lengths[0]), 4), (sum(lengths[1]), 2), (sum(lengths[1]), 2)
    tensors = [torch.randn(*shape, 16, device=device).to(dtype) for shape in shapes]
    return [*tensors, torch.rand(4, device=device)]


@pytest.mark.parametrize("name", PACKED)
@on_every_implementation
def test_a_part_of_packed_sequences_draws_the_mask_of_the_whole(backend, device, dtype, name):
    lengths = PACKED[name]
    seed = torch.tensor(77, device=device)

    def in_parts(tensors):
        query, key, value, slopes = tensors
        out = torch.zeros_like(query)
        lse = torch.zeros(4, len(query), device=device, dtype=torch.promote_types(query.dtype, torch.float32))
        early, late = ([each[:2] for each in lengths], [each[2:] for each in lengths])
        parts = [(0, 0, 0, lengths), (1, 0, 0, early), (1, *map(sum, early), late)]  # key head, first tokens, lengths
        for key_head, first_query, first_key, own in parts:
            heads, key_heads = slice(2 * key_head, 2 * key_head + 2), slice(key_head, key_head + 1)
            rows, keys = slice(first_query, first_query + sum(own[0])), slice(first_key, first_key + sum(own[1]))
            origins = dropout_origins(seed, 1, 4, first_query, first_key)[0, heads]
            part = query[rows, heads], key[keys, key_heads], value[keys, key_heads], slopes[heads]
            out[rows, heads], lse[heads, rows] = attend_packed(part, own, origins, backend)
        return out, lse

    def whole(tensors):
        return attend_packed(tensors, lengths, seed, "reference")

    check_parts(whole, in_parts, packed_inputs(lengths, device, dtype))


@pytest.mark.parametrize("name", PACKED)
@on_every_implementation
def test_mask_of_any_origins_of_packed_sequences(backend, device, dtype, name):
    lengths = PACKED[name]
    query, key = (torch.zeros(sum(each), 2, 128, device=device, dtype=dtype) for each in lengths)
    origins, slopes = draw_origins((2,), device), torch.zeros(2, device=device)
    masks = []
    for values, width in one_hot_values(len(key)):
        value = values.to(key)[:, None].expand_as(key)
        out, _ = attend_packed((query, key, value, slopes), lengths, origins, backend)
        masks.append(out[..., :width].transpose(0, 1) != 0)
    sequence = [torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each)) for each in lengths]
    same = sequence[0][:, None] == sequence[1]
    assert torch.equal(torch.cat(masks, -1).cpu(), expected_mask(origins, len(query), len(key)) & same)


# ---- compiled


def test_origins_inside_of_a_compiled_function():
    def attend(query, key, value, seed):
        origins = dropout_origins(seed, query.shape[0], query.shape[1], first_query=8, first_key=4)
        return attend_dense((query, key, value, None), {}, origins, "reference")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (8, 12):
        query, key, value = (torch.randn(2, 2, length, 4) for _ in range(3))
        torch.testing.assert_close(
            compiled(query, key, value, torch.tensor(5)), attend(query, key, value, torch.tensor(5))
        )
