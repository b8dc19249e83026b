"""Tokens exchanged for heads and back: every element arrives. test_context_attention.py attends in between."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from seqwarm_kernels.parallel import heads_to_tokens, local_heads, tokens_to_heads

from ..support.ranks import run_on_mesh
from ..support.tiers import first_fast

ROWS, HEADS, LENGTH, WIDTH = 3, 8, 20, 5


def whole_and_own(mesh):
    """A tensor, and the tokens of this rank."""
    part = LENGTH // mesh.size()
    return torch.randn(ROWS, HEADS, LENGTH, WIDTH), slice(mesh.get_rank() * part, (mesh.get_rank() + 1) * part)


def check_exchange(mesh):
    tensor, tokens = whole_and_own(mesh)
    heads = slice(mesh.get_rank() * HEADS // mesh.size(), (mesh.get_rank() + 1) * HEADS // mesh.size())
    by_heads = tokens_to_heads(tensor[:, :, tokens], mesh)
    assert torch.equal(by_heads, tensor[:, heads])
    assert torch.equal(heads_to_tokens(by_heads, mesh), tensor[:, :, tokens])
    empty = tokens_to_heads(tensor[:0, :, tokens], mesh)
    assert empty.shape == (0, HEADS // mesh.size(), LENGTH, WIDTH)
    for slopes in (torch.rand(HEADS), torch.rand(ROWS, HEADS)):
        assert torch.equal(local_heads(slopes, mesh), slopes[..., heads])


def check_compiled(mesh):
    tensor, tokens = whole_and_own(mesh)

    def there_and_back(part):
        return heads_to_tokens(2 * tokens_to_heads(part, mesh), mesh)

    part = tensor[:, :, tokens].clone().requires_grad_()
    out = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(part)
    out.sum().backward()
    assert torch.equal(out, 2 * part)
    assert torch.equal(part.grad, torch.full_like(part, 2))


def check_refused(mesh):
    (tensor, _), size = whole_and_own(mesh), mesh.size()
    square = init_device_mesh("cpu", (1, size))
    cases = [
        (ValueError, "heads", tokens_to_heads, tensor[:, :3], mesh),
        (TypeError, "DTensor", tokens_to_heads, distribute_tensor(tensor, mesh, [Replicate()]), mesh),
        (ValueError, "mesh", tokens_to_heads, tensor, square),
        (ValueError, "mesh", heads_to_tokens, tensor, square),
        (ValueError, "mesh", local_heads, torch.ones(8), square),
    ]
    for error, name, function, argument, of_ranks in cases:
        with pytest.raises(error, match=name):
            function(argument, of_ranks)


@pytest.mark.parametrize("size", first_fast([2, 4]))
@pytest.mark.parametrize("check", [check_exchange, check_refused, pytest.param(check_compiled, marks=pytest.mark.slow)])
def test_ranks(check, size):
    run_on_mesh(check, world_size=size)
