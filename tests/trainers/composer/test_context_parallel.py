"""A HuggingFaceModel with ContextParallel on two ranks trains as on one: equal losses, and each token counts once.

../test_context_parallel.py has the other trainings.
"""

from types import SimpleNamespace

import pytest
import torch

from . import conftest  # noqa: F401  # each process imports Composer this way

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from composer import Callback
from composer.core import Precision
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric

from seqwarm_kernels.parallel import shard_sequence
from seqwarm_kernels.trainers.composer import SeqLengthWarmup, TokenCounter
from seqwarm_kernels.trainers.composer.algorithms import claim_memory
from seqwarm_kernels.trainers.composer.context_shards import ContextShards

from ...support.ranks import leave_group, run_ranks, set_environment
from ..contract.cases import Case, Decoder, collate_padded, items
from ..test_context_parallel import shard
from .training import Run


class Counts(Callback):
    """Composer's own counts after each batch."""

    def __init__(self):
        self.counts = []

    def batch_end(self, state, logger):
        names = ("batch", "sample", "token", "sample_in_epoch", "token_in_epoch", "token_in_iteration")
        self.counts.append([getattr(state.timestamp, name).value for name in names])


def run(ranks, *callbacks, warms=True, metrics=None):
    """4 batches of 3 rows: their tokens are shared. Of microbatches of 2 rows, only the second one's are."""
    model = HuggingFaceModel(shard(Decoder("llama-alibi").network.float(), ranks), metrics=metrics)
    rows = items(Case(data="padded"))[:12]
    sampler = DistributedSampler(rows, num_replicas=1, rank=0, shuffle=False)  # the ranks share rows
    loader = DataLoader(rows, 3, sampler=sampler, collate_fn=collate_padded)
    warmup = SeqLengthWarmup(duration=1, min_seq_length=4, max_seq_length=16, step_size=4)
    algorithms = [warmup] if warms else []
    options = {"callbacks": [TokenCounter(), *callbacks], "device_train_microbatch_size": 2}
    return Run("12sp", *algorithms, model=model, dataloader=loader, eval_dataloader=loader, **options)


def report(ranks):
    counts = Counts()
    done = run(ranks, counts).fit()
    outputs = done.trainer.predict(done.trainer.state.train_dataloader)
    figures = [*done.seen.losses, *(each["logits"].abs().mean().item() for each in outputs)]
    return figures, [counts.counts, done.metric("train_tokens"), done.seen.lengths, done.seen.eval_shapes]


def one_of_two(rank, port, folder):
    set_environment(rank, port)
    dist.initialize_dist("cpu")
    torch.save(report(2), folder / f"{rank}.pt")
    with pytest.raises(ValueError, match="inputs"):
        run(2, warms=False).fit()
    with pytest.raises(ValueError, match="metrics"):
        run(2, metrics=[MeanMetric()]).fit()
    check_claim()
    leave_group()


def check_claim():
    """The run at full length, which CPUs skip: the model gets its part of the tokens."""
    model, seen = HuggingFaceModel(shard(Decoder("llama-alibi").network, 2)), []
    model.model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    state = SimpleNamespace(
        model=model,
        train_metrics={},
        device_train_microbatch_size=2,
        auto_microbatching=False,
        precision=Precision.FP32,
    )
    mesh = ContextShards(state).shard.mesh
    ids = torch.ones(4, 32, dtype=torch.long)
    claim_memory(state, {"input_ids": ids, "labels": ids}, lambda batch: shard_sequence(batch, mesh))
    assert set(seen) == {(2, 16)}


def test_two_ranks_train_as_one(tmp_path):
    run_ranks(one_of_two, tmp_path)
    of_ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    figures, counts = report(1)
    assert [own for _, own in of_ranks] == [counts] * 2
    mean = torch.tensor([own for own, _ in of_ranks]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(figures), rtol=2e-5, atol=1e-5)
    assert len({*counts[2]}) > 2
