"""A model with ContextParallel on two ranks trains as on one in Composer: equal losses, and each token counts once."""

import json

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

from . import conftest  # noqa: F401  # each process imports Composer this way

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from types import SimpleNamespace

from composer import Callback, Trainer
from composer.core import Precision
from composer.models import HuggingFaceModel
from composer.utils import dist
from torchmetrics import MeanMetric

from seqwarm_kernels.parallel import ContextParallel, shard_sequence
from seqwarm_kernels.trainers.composer import SeqLengthWarmup, TokenCounter
from seqwarm_kernels.trainers.composer.algorithms import claim_memory
from seqwarm_kernels.trainers.composer.context_shards import ContextShards

from ...support.ranks import leave_group, run_ranks, set_environment
from ..shards import part_of, watch
from ..test_packed import COLLATORS, model, padded, sequences

ROWS = 12
CASES = {
    "padded": {"max_duration": "6ba"},
    "microbatches": {"max_duration": "96sp", "device_train_microbatch_size": 1},  # of one row, so tokens are shared
    "by tokens": {"max_duration": "3500tok"},
    "packed": {"max_duration": "6ba"},
    "reshaped": {"max_duration": "6ba"},
}
#: Batches of one row: a reshaped one has 5 rows of 8 tokens, 2 of 16, and 1 of 24.
ROWS_OF_BATCH = {"reshaped": 1}


class Record(Callback):
    """The losses and Composer's own counts after each batch, and the losses of evaluation."""

    def __init__(self):
        self.losses, self.evaluated, self.counts = [], [], []

    def batch_end(self, state, logger):
        self.losses.append(state.total_loss_dict["loss/train/total"])
        now = state.timestamp
        names = ("batch", "sample", "token", "sample_in_epoch", "token_in_epoch", "token_in_iteration")
        length = state.batch["input_ids"].shape[1]
        self.counts.append([*(getattr(now, name).value for name in names), length])

    def eval_after_forward(self, state, logger):
        self.evaluated.append(state.outputs["loss"].item())


def loader(kind):
    rows = sequences()[:ROWS]
    sampler = DistributedSampler(rows, num_replicas=1, rank=0, shuffle=False)  # the ranks share rows
    return DataLoader(
        rows, ROWS_OF_BATCH.get(kind, 4), sampler=sampler, collate_fn=COLLATORS[0] if kind == "packed" else padded
    )


def trainer(made, kind, ranks, *callbacks, algorithms=None, metrics=None, **settings):
    if ranks > 1:
        parallelize_module(made, init_device_mesh("cpu", (ranks,)), ContextParallel())
    warmup = SeqLengthWarmup(duration=1, min_seq_length=8, max_seq_length=40, step_size=8, truncate=kind != "reshaped")
    return Trainer(
        model=HuggingFaceModel(made, metrics=metrics),
        train_dataloader=loader(kind),
        eval_dataloader=loader(kind),
        eval_interval="1ep",
        algorithms=warmup if algorithms is None else algorithms,
        callbacks=callbacks,
        optimizers=torch.optim.SGD(made.parameters(), lr=0.5),
        device="cpu",
        seed=0,
        progress_bar=False,
        **settings,
    )


def reports(ranks):
    found = []
    for kind, settings in CASES.items():
        record, counter, made = Record(), TokenCounter(), model()
        seen = watch(made)
        training = trainer(made, kind, ranks, counter, record, **settings)
        training.fit()
        predicted = [each["logits"].abs().mean().item() for each in training.predict(loader("padded"))]
        found.append([[*record.losses, *record.evaluated, *predicted], [*record.counts, counter.train_tokens], seen])
        training.close()
    return found


def one_of_two(rank, port, folder):
    set_environment(rank, port)
    dist.initialize_dist("cpu")
    (folder / f"{rank}.json").write_text(json.dumps(reports(2)))
    with pytest.raises(ValueError, match="inputs"):
        trainer(model(), "padded", 2, TokenCounter(), algorithms=[], max_duration="1ba").fit()
    with pytest.raises(ValueError, match="metrics"):
        trainer(model(), "padded", 2, metrics=[MeanMetric()], max_duration="1ba").fit()
    check_claim()
    leave_group()


def check_claim():
    """The run at full length, which CPUs skip: the model gets its part of the tokens."""
    made, mesh, seen = model(), init_device_mesh("cpu", (2,)), []
    parallelize_module(made, mesh, ContextParallel())
    made.model.embed_tokens.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    state = SimpleNamespace(
        model=HuggingFaceModel(made),
        train_metrics={},
        device_train_microbatch_size=2,
        auto_microbatching=False,
        precision=Precision.FP32,
    )
    ContextShards(state)
    ids = torch.ones(4, 32, dtype=torch.long)
    claim_memory(state, {"input_ids": ids, "labels": ids}, lambda batch: shard_sequence(batch, mesh))
    assert set(seen) == {(2, 16)}


def test_two_ranks_train_as_one(tmp_path):
    run_ranks(one_of_two, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for kind, own, other, (losses, counts, whole) in zip(CASES, first, second, reports(1), strict=True):
        assert own[1] == other[1] == counts, kind
        if kind != "packed":  # which are padded
            assert own[2] == other[2] == [part_of(*shape) for *shape, _ in whole], kind
        mean = torch.tensor([own[0], other[0]]).mean(0)
        torch.testing.assert_close(mean, torch.tensor(losses), rtol=2e-5, atol=1e-5)
        assert len({count[-1] for count in counts[:-1]}) > 2
