"""Tokens exchanged for heads and back: every element arrives. test_context_attention.py attends in between."""

import pytest
import torch

from seqwarm_kernels.parallel import heads_to_tokens, local_heads, tokens_to_heads

from ..support.ranks import run_on_mesh
from ..support.tiers import first_fast


def check_exchange(mesh):
    rank, size, tensor = mesh.get_rank(), mesh.size(), torch.randn(3, 8, 20, 5)
    own_tokens, own_heads = tensor.chunk(size, 2)[rank], tensor.chunk(size, 1)[rank]
    assert torch.equal(tokens_to_heads(own_tokens, mesh), own_heads)
    assert torch.equal(heads_to_tokens(own_heads, mesh), own_tokens)
    assert tokens_to_heads(own_tokens[:0], mesh).shape == own_heads[:0].shape
    for slopes in (torch.rand(8), torch.rand(3, 8)):
        assert torch.equal(local_heads(slopes, mesh), slopes.chunk(size, -1)[rank])
    with pytest.raises(ValueError, match="heads"):
        tokens_to_heads(tensor[:, :3], mesh)


def check_compiled(mesh):
    def there_and_back(part):
        return heads_to_tokens(2 * tokens_to_heads(part, mesh), mesh)

    part = torch.randn(3, 8, 20 // mesh.size(), 5, requires_grad=True)
    out = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(part)
    out.sum().backward()
    assert torch.equal(out, 2 * part)
    assert torch.equal(part.grad, torch.full_like(part, 2))


@pytest.mark.parametrize("size", first_fast([2, 4]))
@pytest.mark.parametrize("check", [check_exchange, pytest.param(check_compiled, marks=pytest.mark.slow)])
def test_ranks(check, size):
    run_on_mesh(check, world_size=size)
