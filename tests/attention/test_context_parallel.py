"""Inside torch's context_parallel, attention to a part of the tokens is refused."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from seqwarm_kernels import alibi_attention, alibi_attention_varlen

from ..support.ranks import free_port, join_group


@pytest.fixture
def mesh():
    join_group(0, free_port(), world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("is_known", [False, True])
def test_calls_are_refused(mesh, is_known):
    """Also calls of a kind that was checked before."""
    rows, ends = torch.randn(1, 2, 12 + is_known, 8), torch.tensor([0, 12], dtype=torch.int32)

    def attend():
        return alibi_attention(rows, rows, rows)

    def attend_packed():
        packed = rows[0, :, :12].transpose(0, 1)
        return alibi_attention_varlen(packed, packed, packed, ends, ends, 12, 12)

    before = [attend(), attend_packed()] if is_known else []
    buffer = torch.zeros(1, 16)
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
        for call in (attend, attend_packed):
            with pytest.raises(ValueError, match="query must hold the tokens of whole rows, got a call inside torch's"):
                call()
    if is_known:
        assert torch.equal(attend(), before[0])
        assert torch.equal(attend_packed(), before[1])
