"""Each argument of each public name of `parallel` replaced by values that make no sense, on one rank."""

from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from seqwarm_kernels import apply_alibi, parallel

from ..support.arguments import check_all_arguments


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def mesh():
    return DeviceMesh("cpu", [0])


def tensors(**more):
    made = dict(zip(("query", "key", "value"), torch.randn(3, 1, 2, 4, 8).unbind(), strict=True))
    return made | {"slopes": torch.tensor([0.5, 0.25]), "mesh": mesh(), "causal": True, "scale": 1.0} | more


def model():
    """Its attention layer expects shards."""
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    apply_alibi(model, 8)
    return parallelize_module(model, mesh(), parallel.ContextParallel())


def batch():
    return {"input_ids": torch.ones(2, 8, dtype=torch.int64)}


def sharded_by(by):
    with parallel.sharded_by(model(), by):
        pass


def dense(**more):
    mask = torch.ones(1, 4, dtype=torch.bool)
    return tensors(segment_length=None, window=2, key_padding_mask=mask, skip_tolerance=0.0, **more)


def packed(**more):
    made = tensors(window=2, skip_tolerance=0.0, cu_seqlens=torch.tensor([0, 1, 4], dtype=torch.int32), max_seqlen=3)
    for name in ("query", "key", "value"):
        made[name] = made[name][0].transpose(0, 1)
    return made | more


ATTENTION = {"halo": None, "dropout_p": 0.0, "return_lse": False, "backend": "reference"}

CALLS = {
    "ContextBatches": (
        lambda shift_labels: parallel.ContextBatches(model(), shift_labels=shift_labels),
        lambda: {"shift_labels": True},
    ),
    "ContextBatches.call": (lambda batch: parallel.ContextBatches(model())(batch), lambda: {"batch": batch()}),
    "ContextParallel": (parallel.ContextParallel, lambda: {"halo": [4, 4]}),
    "context_attention": (parallel.context_attention, lambda: dense(**ATTENTION)),
    "context_attention_varlen": (parallel.context_attention_varlen, lambda: packed(**ATTENTION)),
    "halo_widths": (
        parallel.halo_widths,
        lambda: {name: value for name, value in dense().items() if name != "value"},
    ),
    "heads_to_tokens": (partial(parallel.heads_to_tokens, torch.randn(1, 2, 4, 8)), lambda: {"mesh": mesh()}),
    "local_heads": (partial(parallel.local_heads, torch.tensor([0.5, 0.25])), lambda: {"mesh": mesh()}),
    "shard_sequence": (
        parallel.shard_sequence,
        lambda: {"batch": batch(), "mesh": mesh(), "seq_len": 4, "by": "tokens", "shift_labels": True},
    ),
    "sharded_by": (sharded_by, lambda: {"by": "rows"}),
    "tokens_to_heads": (partial(parallel.tokens_to_heads, torch.randn(1, 2, 4, 8)), lambda: {"mesh": mesh()}),
}

#: Without arguments, a plain record, or without checks of their own.
OTHERS = {"RankWork", "ShardSlopes", "balanced_slopes", "rank_work"}


def test_every_public_name_is_called():
    assert {name.partition(".")[0] for name in CALLS} | OTHERS == set(parallel.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_junk(name):
    check_all_arguments(*CALLS[name])


@pytest.mark.parametrize(
    ("ends", "max_seqlen", "name"),
    [
        ([0, 1, 5], 4, "cu_seqlens"),
        ([0, 3, 1], 3, "cu_seqlens"),
        ([1, 4], 3, "cu_seqlens"),
        ([0, 1, 4], 2, "max_seqlen"),
    ],
)
def test_boundaries_of_no_packed_sequences(ends, max_seqlen, name):
    call, make = CALLS["context_attention_varlen"]
    ends = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^{name}"):
        call(**make() | {"cu_seqlens": ends, "max_seqlen": max_seqlen, "slopes": None})
