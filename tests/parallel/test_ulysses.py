"""Tokens exchanged for heads and back: every element arrives, and attention between has the results of one device."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import seqwarm_kernels as sw
from seqwarm_kernels.parallel import heads_to_tokens, local_heads, tokens_to_heads

from ..support.ranks import join_group, leave_group, run_ranks

ROWS, HEADS, KEY_HEADS, LENGTH, WIDTH = 3, 8, 4, 20, 5


def ranks(rank, port, world_size):
    join_group(rank, port, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    *tensors, gradient = (torch.randn(ROWS, heads, LENGTH, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS))
    tokens = slice(rank * LENGTH // world_size, (rank + 1) * LENGTH // world_size)
    check_exchange(rank, mesh, tensors[0], tokens)
    for slopes in (sw.alibi_slopes(HEADS), sw.alibi_slopes(HEADS) * torch.tensor([[1.0], [2.0], [0.5]])):
        check_attention(mesh, tensors, slopes, gradient, tokens)
    check_compiled(mesh, tensors[0], tokens)
    check_refused(mesh, tensors[0])
    leave_group()


def check_exchange(rank, mesh, tensor, tokens):
    heads = slice(rank * HEADS // mesh.size(), (rank + 1) * HEADS // mesh.size())
    by_heads = tokens_to_heads(tensor[:, :, tokens], mesh)
    assert torch.equal(by_heads, tensor[:, heads])
    assert torch.equal(heads_to_tokens(by_heads, mesh), tensor[:, :, tokens])
    empty = tokens_to_heads(tensor[:0, :, tokens], mesh)
    assert empty.shape == (0, HEADS // mesh.size(), LENGTH, WIDTH)


def attend(tensors, slopes, mesh):
    query, key, value = (tokens_to_heads(tensor, mesh) for tensor in tensors)
    return heads_to_tokens(sw.alibi_attention(query, key, value, local_heads(slopes, mesh)), mesh)


def check_attention(mesh, tensors, slopes, gradient, tokens):
    wholes = [tensor.clone().requires_grad_() for tensor in (*tensors, slopes)]
    expected = sw.alibi_attention(*wholes)
    expected.backward(gradient)
    parts = [tensor[:, :, tokens].clone().requires_grad_() for tensor in tensors]
    own_slopes = slopes.clone().requires_grad_()
    out = attend(parts, own_slopes, mesh)
    out.backward(gradient[:, :, tokens])
    assert torch.equal(out, expected[:, :, tokens])
    for part, tensor in zip(parts, wholes[:3], strict=True):
        assert torch.equal(part.grad, tensor.grad[:, :, tokens])
    torch.distributed.all_reduce(own_slopes.grad)  # each rank has the gradients of its heads, and zeros
    assert torch.equal(own_slopes.grad, wholes[3].grad)


def check_compiled(mesh, tensor, tokens):
    def there_and_back(part):
        return heads_to_tokens(2 * tokens_to_heads(part, mesh), mesh)

    part = tensor[:, :, tokens].clone().requires_grad_()
    out = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(part)
    out.sum().backward()
    assert torch.equal(out, 2 * part)
    assert torch.equal(part.grad, torch.full_like(part, 2))


def check_refused(mesh, tensor):
    size = mesh.size()
    square = init_device_mesh("cpu", (1, size))
    cases = [
        (ValueError, "heads", tokens_to_heads, tensor[:, :3], mesh),
        (RuntimeError, "unflatten", heads_to_tokens, tensor[:, :, :9], mesh),
        (RuntimeError, "permute", tokens_to_heads, tensor[0], mesh),
        (TypeError, "DTensor", tokens_to_heads, distribute_tensor(tensor, mesh, [Replicate()]), mesh),
        (RuntimeError, "unflatten", local_heads, torch.ones(3), mesh),
        (ValueError, "mesh", tokens_to_heads, tensor, square),
        (ValueError, "mesh", heads_to_tokens, tensor, square),
        (ValueError, "mesh", local_heads, torch.ones(8), square),
    ]
    for error, name, function, argument, of_ranks in cases:
        with pytest.raises(error, match=name):
            function(argument, of_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks(world_size):
    run_ranks(ranks, world_size, world_size=world_size)
