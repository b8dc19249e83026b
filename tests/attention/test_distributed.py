"""A compiled model under DistributedDataParallel has the losses of a single process."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from seqwarm_kernels import alibi_attention, alibi_slopes

from ..support.backends import serving
from ..support.ranks import mean_of_two_ranks

STEPS, BATCH_SIZE, LENGTH, WIDTH, HEADS, WORDS = 3, 4, 24, 16, 2, 11
SERVING = serving()


class Model(nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.backend = backend
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.slopes = nn.Parameter(alibi_slopes(HEADS))

    def forward(self, tokens):
        x = self.embedding(tokens)
        query, key, value = self.projection(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = alibi_attention(query, key, value, self.slopes, backend=self.backend)
        return self.head(x + out.transpose(1, 2).flatten(2))


def losses_of(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in batches:
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def model_and_batches(backend):
    """The module inside DistributedDataParallel is compiled, as in torch's guide."""
    torch.manual_seed(0)
    model = Model(backend)
    model.compile(fullgraph=True, backend="aot_eager")
    return model, torch.randint(WORDS, (STEPS, BATCH_SIZE, LENGTH + 1))


def losses_of_half(rank, backend):
    model, batches = model_and_batches(backend)
    return losses_of(DistributedDataParallel(model), batches.chunk(2, dim=1)[rank])


@pytest.mark.slow
@pytest.mark.exhaustive_in_interpreter
@pytest.mark.parametrize("backend", SERVING)
def test_two_processes_have_the_losses_of_one(backend):
    together = mean_of_two_ranks(losses_of_half, backend)
    alone = losses_of(*model_and_batches(backend))
    assert alone[-1] < alone[0]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
