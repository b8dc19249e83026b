"""A part of a call draws the dropout mask of the whole: seeds and head_offsets of each head, in every backend."""

import pytest
import torch

from seqwarm_kernels.attention.calls import DenseCall, VarlenCall, check_dense, check_varlen
from seqwarm_kernels.ops.alibi_attention.dropout import dropout_offsets, keep_mask
from tests.support.attention_cases import Case, PackedCase
from tests.support.backends import implementations
from tests.support.kernels import check_attention
from tests.support.tiers import first_fast

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def attend_dense(leaves, dropout_seed, backend, **options):
    """out and lse. `dropout_seed` may be the seed or head_offsets, which the public function does not take."""
    call = DenseCall(*leaves, backend=backend, **{"skip_tolerance": 0.0, "dropout_p": 0.3, **options})
    return results_of(dropout_seed, *check_dense(call))


def attend_packed(leaves, ends, longest, dropout_seed, backend, **options):
    """The same of packed sequences, with lse (T, H)."""
    options = {"skip_tolerance": 0.0, "dropout_p": 0.3, "causal": False, **options}
    call = VarlenCall(*leaves, *ends, *longest, backend=backend, **options)
    out, lse = results_of(dropout_seed, *check_varlen(call))
    return out, lse.T


def results_of(dropout_seed, operator, tensors, options):
    if options.dropout_p:
        options = options._replace(dropout_seed=dropout_seed)
    return operator(*tensors, *options)[:2]


def draw_offsets(*shape):
    """Any seeds, heads and firsts whose counters fit into 32 bits."""
    seed = torch.randint(-(2**63), 2**63 - 1, shape)
    head, first_query = torch.randint(2**32, shape), torch.randint(2**32 - 1000, shape)
    first_key = 4 * torch.randint(2**32 - 1000, shape)
    return torch.stack((seed, head, first_query, first_key), -1)


CASES = {
    "rows that share tiles": Case({}, (12, 12), batch_size=5),
    "segments that share tiles": Case({"segment_length": 8}, (16, 16), batch_size=3),
    "tiles": Case({"window": 20}, (70, 90), heads=(4, 2), batch_size=2),
    "tiles, mask": Case({"causal": False}, (35, 150), mask="random"),
    "one query": Case({"window": 560}, (1, 600)),
    "four queries": Case({"window": 559}, (4, 600), mask="random"),
}
PACKED_CASES = {
    "sequences that share tiles": PackedCase(([5, 12, 3, 2], [9, 12, 3, 4])),
    "long sequences": PackedCase(([90, 7, 0, 72], [93, 3, 0, 101])),
}


@pytest.mark.parametrize(
    "name", [*first_fast(CASES, "exhaustive_in_interpreter"), *first_fast(PACKED_CASES, "exhaustive_in_interpreter")]
)
@pytest.mark.parametrize(("backend", "device", "dtype"), implementations())
def test_results_with_any_offsets(backend, device, dtype, name):
    if name in CASES:
        leaves, options = CASES[name].inputs(device, dtype)
        attend, where = attend_dense, [draw_offsets(*leaves[0].shape[:2]).to(device)]
    else:
        leaves, *where, options = PACKED_CASES[name].inputs(device, dtype)
        attend, where = attend_packed, [*where, draw_offsets(4).to(device)]

    def attend_there(leaves, backend, **changes):
        return attend(leaves, *where, backend, **{**options, **changes})

    check_attention(backend, attend_there, leaves)


def test_mask_of_any_offsets():
    """With one-hot values the outputs show which weights are not 0."""
    head_offsets = draw_offsets(2, 3)
    query, key = torch.zeros(2, 3, 7, 16), torch.zeros(2, 3, 16, 16)
    value = torch.eye(16).expand_as(key)
    out, _ = attend_dense((query, key, value, torch.zeros(3)), head_offsets, "reference", causal=False)
    seed, head, first_query, first_key = head_offsets[..., None, None, :].unbind(-1)
    mask = keep_mask(0.3, seed, head, first_query + torch.arange(7)[:, None], first_key + torch.arange(16))
    assert torch.equal(out != 0, mask)


SEED = torch.tensor(2**62 + 77)


def test_a_part_draws_the_mask_of_the_whole():
    query, key, value, slopes = CASES["tiles"].inputs()[0]
    whole = attend_dense((query, key, value, slopes), SEED, "reference", window=20)
    head_offsets = dropout_offsets(SEED, 2, 4, first_query=24, first_key=16)[1:, 2:]
    part = query[1:, 2:, 24:], key[1:, 1:, 16:], value[1:, 1:, 16:], slopes[2:]
    for found, expected in zip(attend_dense(part, head_offsets, "reference", window=20), whole, strict=True):
        torch.testing.assert_close(found, expected[1:, 2:, 24:])


def test_a_part_of_packed_sequences_draws_the_mask_of_the_whole():
    """Its last two sequences, and the last two heads."""
    (query, key, value, slopes), ends, longest, _ = PACKED_CASES["long sequences"].inputs()
    whole = attend_packed((query, key, value, slopes), ends, longest, SEED, "reference")
    first_query, first_key = (int(each[2]) for each in ends)
    head_offsets = dropout_offsets(SEED, 1, 4, first_query, first_key)[0, 2:]
    part = query[first_query:, 2:], key[first_key:, 1:], value[first_key:, 1:], slopes[2:]
    of_part = attend_packed(part, [each[2:] - each[2] for each in ends], longest, head_offsets, "reference")
    for found, expected in zip(of_part, whole, strict=True):
        torch.testing.assert_close(found, expected[first_query:, 2:])


def test_offsets_inside_of_a_compiled_function():
    def attend(query, key, value, seed):
        head_offsets = dropout_offsets(seed, query.shape[0], query.shape[1], first_query=8, first_key=4)
        return attend_dense((query, key, value, None), head_offsets, "reference")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (8, 12):
        query, key, value = (torch.randn(2, 2, length, 4) for _ in range(3))
        torch.testing.assert_close(
            compiled(query, key, value, torch.tensor(5)), attend(query, key, value, torch.tensor(5))
        )
