"""The functions of `parallel` on one rank, which has everything, and arguments that make no sense: errors that name
them."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

from seqwarm_kernels import SequenceLengthScheduler, apply_alibi, parallel

from ..support.ranks import one_rank


@pytest.fixture(scope="module", autouse=True)
def group():
    with one_rank():
        yield


def mesh():
    return DeviceMesh("cpu", [0])


def mesh_of_two_dimensions():
    return DeviceMesh("cpu", [[0]])


def placed():
    return DTensor.from_local(torch.randn(1, 2, 4, 8), mesh(), [Replicate()])


def model():
    """Its attention layer expects shards."""
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    apply_alibi(model, 8)
    return parallelize_module(model, mesh(), parallel.ContextParallel())


def sharded_by(model, by):
    with parallel.sharded_by(model, by):
        pass


def dense():
    return {name: torch.randn(1, 2, 4, 8) for name in ("query", "key", "value")} | {"mesh": mesh()}


def packed():
    made = {name: torch.randn(4, 2, 8) for name in ("query", "key", "value")} | {"mesh": mesh()}
    return made | {"cu_seqlens": torch.tensor([0, 1, 4], dtype=torch.int32), "max_seqlen": 3}


#: How each function is called. `ContextBatches.call` is a call of an object of that class.
CALLS = {
    "ContextBatches": (parallel.ContextBatches, lambda: {"model": model()}),
    "ContextBatches.call": (
        lambda batch: parallel.ContextBatches(model())(batch),
        lambda: {"batch": {"input_ids": torch.ones(2, 8, dtype=torch.int64)}},
    ),
    "ContextParallel": (parallel.ContextParallel, lambda: {"halo": [4, 4]}),
    "context_attention": (parallel.context_attention, dense),
    "context_attention_varlen": (parallel.context_attention_varlen, packed),
    "apply_alibi": (lambda model: apply_alibi(model, 8), dict),
    "attach": (lambda model: SequenceLengthScheduler(2, 8, duration=3).attach(model), dict),
    "ShardSlopes": (lambda alibi: parallelize_module(alibi, mesh(), parallel.ShardSlopes()), dict),
    "halo_widths": (parallel.halo_widths, lambda: {name: dense()[name] for name in ("query", "key", "mesh")}),
    "heads_to_tokens": (parallel.heads_to_tokens, lambda: {"tensor": torch.randn(1, 2, 4, 8), "mesh": mesh()}),
    "local_heads": (parallel.local_heads, lambda: {"slopes": torch.tensor([0.5, 0.25]), "mesh": mesh()}),
    "shard_sequence": (
        parallel.shard_sequence,
        lambda: {"batch": {"input_ids": torch.ones(2, 8, dtype=torch.int64)}, "mesh": mesh()},
    ),
    "sharded_by": (sharded_by, lambda: {"model": model(), "by": "rows"}),
    "tokens_to_heads": (parallel.tokens_to_heads, lambda: {"tensor": torch.randn(1, 2, 4, 8), "mesh": mesh()}),
}
OF_ATTENTION = ("context_attention", "context_attention_varlen", "halo_widths")
EXCHANGES = ("heads_to_tokens", "tokens_to_heads")
BAD = [
    *(
        (call, "mesh", value)
        for call in (*OF_ATTENTION, *EXCHANGES, "local_heads", "shard_sequence")
        for value in ("cpu", mesh_of_two_dimensions)
    ),
    *((call, "halo", halo) for call in (*OF_ATTENTION[:2], "ContextParallel") for halo in (-1, 2.5, [4, "x"])),
    *((call, "halo", [4, 4, 4]) for call in OF_ATTENTION[:2]),
    *((call, "query", value) for call in OF_ATTENTION for value in (None, placed)),
    *((call, "tensor", placed) for call in EXCHANGES),
    ("context_attention", "key", torch.zeros(1, 2, 8, 8)),
    ("halo_widths", "key", torch.zeros(1, 2, 8, 8)),
    ("context_attention_varlen", "key", torch.zeros(8, 2, 8)),
    ("context_attention_varlen", "cu_seqlens", [0, 4]),
    *(
        ("context_attention_varlen", "cu_seqlens", torch.tensor(ends, dtype=torch.int32))
        for ends in ([0, 1, 5], [0, 3, 1], [1, 4])
    ),
    *(("context_attention_varlen", "max_seqlen", longest) for longest in (2, -1, None)),
    *((call, "by", "heads") for call in ("shard_sequence", "sharded_by")),
    *((call, "shift_labels", 1) for call in ("shard_sequence", "ContextBatches")),
    ("shard_sequence", "keys", ["ids"]),
    ("shard_sequence", "seq_len", 0),
    ("shard_sequence", "batch", None),
    ("ContextBatches.call", "batch", None),
    ("ContextBatches", "model", lambda: nn.Linear(2, 2)),
    ("apply_alibi", "model", model),
    ("attach", "model", model),
    ("ShardSlopes", "alibi", lambda: nn.Linear(2, 2)),
]


@pytest.mark.parametrize(
    ("name", "argument", "value"), BAD, ids=lambda value: getattr(value, "__name__", str(value)[:30])
)
def test_bad_arguments(name, argument, value):
    call, make = CALLS[name]
    with pytest.raises((TypeError, ValueError), match=rf"\b{argument}\b"):
        call(**make() | {argument: value() if callable(value) else value})


@pytest.mark.parametrize("rows", [1, 3])
def test_one_rank_takes_whole_rows_of_rows_and_the_tokens_of_packed_ones(rows):
    shard = parallel.ContextBatches(model(), shift_labels=False)
    batch = {"input_ids": torch.arange(24).view(rows, -1)}
    part = shard(batch)
    assert part["context_part"] == "rows"
    assert part["input_ids"].equal(batch["input_ids"])
    if rows == 1:
        part = shard({**batch, "position_ids": torch.arange(24).remainder(7)[None]})
        assert part["context_part"] == "tokens"
        assert part["input_ids"].equal(batch["input_ids"])


@pytest.mark.parametrize("learn_slopes", [False, True])
def test_one_rank_keeps_the_slopes_of_all_heads(learn_slopes):
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    apply_alibi(layer, 8, learn_slopes=learn_slopes)
    tokens = torch.randn(1, 5, 8)
    expected, before = layer(tokens, tokens, tokens, is_causal=True)[0], layer.alibi.slopes.tolist()
    parallelize_module(layer.alibi, mesh(), parallel.ShardSlopes())
    assert layer.alibi.slopes.full_tensor().tolist() == before
    assert isinstance(layer.alibi.slopes, nn.Parameter) == learn_slopes
    torch.testing.assert_close(layer(tokens, tokens, tokens, is_causal=True)[0], expected)
