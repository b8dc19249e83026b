"""Inside torch's context parallelism, attention to a part of the tokens is refused."""

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as of_torch
from torch.distributed.tensor.parallel import parallelize_module

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, apply_alibi
from seqwarm_kernels.parallel import context_attention

from ..support.ranks import free_port, join_group

MESSAGE = "context_parallel"
BUFFERS = {"buffers": [torch.zeros(1, 16)], "buffer_seq_dims": [1]}


@pytest.fixture
def mesh():
    join_group(0, free_port(), world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


class Dispatcher:
    def __enter__(self):
        of_torch._enable_context_parallel_dispatcher()

    def __exit__(self, *error):
        of_torch._disable_context_parallel_dispatcher()


def attend(rows):
    return alibi_attention(rows, rows, rows)


def attend_packed(rows):
    packed, ends = rows[0, :, :12].transpose(0, 1), torch.tensor([0, 12], dtype=torch.int32)
    return alibi_attention_varlen(packed, packed, packed, ends, ends, 12, 12)


@pytest.mark.parametrize("call", [attend, attend_packed])
def test_calls_are_refused(mesh, call):
    """Also calls of a kind that was checked before."""
    for is_known, active in enumerate((context_parallel(mesh, **BUFFERS), Dispatcher())):
        rows = torch.randn(1, 2, 12 + is_known, 8)
        before = call(rows) if is_known else None
        with active, pytest.raises(ValueError, match=MESSAGE):
            call(rows)
        assert not is_known or torch.equal(call(rows), before)


def test_compiled_calls_are_refused(mesh):
    """Also if the graph was compiled before. Afterwards it runs again."""
    rows, counter = torch.randn(1, 2, 12, 8), CompileCounter()
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    compiled(rows)
    with Dispatcher(), pytest.raises(Unsupported, match=MESSAGE):
        compiled(rows)
    torch.testing.assert_close(compiled(rows), attend(rows))
    assert counter.frame_count == 1


def test_context_attention_needs_contiguous_parts(mesh):
    """It serves inside of torch's context if torch's shards are contiguous."""
    rows = torch.randn(1, 2, 16, 8)
    with context_parallel(mesh, **BUFFERS), pytest.raises(ValueError, match="context_attention"):
        context_attention(rows, rows, rows, mesh=mesh)
    of_torch._context_parallel_shard(mesh, *BUFFERS.values(), load_balancer=None)
    with Dispatcher():
        out = context_attention(rows, rows, rows, mesh=mesh)
    torch.testing.assert_close(out, alibi_attention(rows, rows, rows))


class Attention(nn.Module):
    def forward(self, query, key, value):
        return alibi_attention(query, key, value)


def test_a_module_with_the_style_for_dot_products_is_refused(mesh):
    """Its inputs become DTensors of shards, whether or not the dispatcher knows of them."""
    style = of_torch._ContextParallel(seq_dim=2, attention_type=of_torch._ContextParallel.AttentionType.SDPA)
    module, rows = parallelize_module(Attention(), mesh, style), torch.randn(1, 2, 12, 8)
    with pytest.raises(ValueError, match="query"):
        module(rows, rows, rows)


def test_a_converted_layer_with_the_style_for_flex_attention_is_refused(mesh):
    """The style gathers keys, after which self-attention would look like cross-attention."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    apply_alibi(layer, 16)
    style = of_torch._ContextParallel(seq_dim=1, attention_type=of_torch._ContextParallel.AttentionType.FLEX)
    parallelize_module(layer, mesh, {"self_attn": style})
    with pytest.raises(ValueError, match="AlibiMultiheadAttention"):
        layer(torch.randn(2, 12, 16))
