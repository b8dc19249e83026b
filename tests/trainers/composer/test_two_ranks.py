"""Composer on two ranks: padded and packed batches, truncated or cut into rows, train on the tokens that are logged."""

import itertools
import json
import os

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from . import conftest  # noqa: F401  # each process imports Composer this way

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from composer import Trainer
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel

from seqwarm_kernels.trainers.composer import SeqLengthWarmup, TokenCounter

from ...support.ranks import leave_group, run_ranks
from ..test_lightning_tokens import LENGTHS, STEPS, padded, valid_tokens
from ..test_packed import COLLATORS, LEARNING_RATE, LENGTH, SEQUENCES, model, sequences

CASES = [*itertools.product(["packed", "padded"], [True, False])]


def trained(kind, truncate, rank):
    """The tokens of each step that this rank's model got, and the count of all ranks in the logs."""
    warmed, logs = model(), InMemoryLogger()
    seen = valid_tokens(warmed)
    size = SEQUENCES // 2
    own = [sequences()[step * SEQUENCES + rank * size + index] for step in range(STEPS) for index in range(size)]
    sampler = DistributedSampler(own, num_replicas=1, rank=0, shuffle=False)  # Composer wants one on several ranks
    collator = COLLATORS[0] if kind == "packed" else padded
    warmup = SeqLengthWarmup(duration=1, min_seq_length=8, max_seq_length=LENGTH, step_size=8, truncate=truncate)
    trainer = Trainer(
        model=HuggingFaceModel(warmed, shift_labels=True),
        train_dataloader=DataLoader(own, size, sampler=sampler, collate_fn=collator),
        max_duration=f"{STEPS}ba",
        algorithms=warmup,
        callbacks=TokenCounter(),
        loggers=logs,
        optimizers=torch.optim.SGD(warmed.parameters(), lr=LEARNING_RATE),
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    return {"seen": seen(), "logged": [value for _, value in logs.data["train_tokens"]]}


def one_of_two(rank, port, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (folder / f"{rank}.json").write_text(json.dumps([trained(*case, rank) for case in CASES]))
    leave_group()


def test_two_ranks_train_on_what_is_logged(tmp_path):
    run_ranks(one_of_two, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for (kind, truncate), *found in zip(CASES, *ranks, strict=True):
        sizes = [LENGTH - 3 * index if kind == "padded" else LENGTH for index in range(SEQUENCES // 2)]
        for rank in found:
            assert rank["logged"] == found[0]["logged"]
            assert rank["logged"][-1] == sum(sum(each["seen"]) for each in found)
            if truncate:  # one pass in each step
                assert rank["seen"] == [sum(min(size, length) for size in sizes) for length in LENGTHS]
