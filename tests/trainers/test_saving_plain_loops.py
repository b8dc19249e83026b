"""Accelerate and Fabric save and load a schedule, a learning rate by tokens and a loader as they do a model."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from seqwarm_kernels import SequenceLengthScheduler, TokenLR
from seqwarm_kernels.data import BatchPlanner, ItemDataset, LengthBatchSampler, ResumableLoader


def made():
    """All parts of a training."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    sampler = LengthBatchSampler(range(4, 40), BatchPlanner(64), rank=0, world_size=1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": SequenceLengthScheduler(4, 16, duration=100, step_size=4, unit="token"),
        "rate": TokenLR(optimizer, warmup_tokens=10, decay_tokens=100),
        "loader": ResumableLoader(DataLoader(ItemDataset(), batch_sampler=sampler, collate_fn=list)),
    }


def with_accelerate(folder, saved, loaded):
    accelerate = pytest.importorskip("accelerate")

    def accelerator_of(parts):
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(parts["model"], parts["optimizer"])
        accelerator.register_for_checkpointing(*(parts[name] for name in ("scheduler", "rate", "loader")))
        return accelerator

    accelerator_of(saved).save_state(str(folder))
    accelerator_of(loaded).load_state(str(folder))


def with_fabric(folder, saved, loaded):
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    fabric.save(folder / "state.ckpt", saved)
    fabric.load(folder / "state.ckpt", loaded)


@pytest.mark.parametrize("move", [with_accelerate, with_fabric])
def test_a_loop_continues(tmp_path, move):
    whole, saved, loaded = made(), made(), made()
    saved["scheduler"].step(50)
    saved["rate"].step(50)
    batches, start = list(whole["loader"]), iter(saved["loader"])
    head = [next(start) for _ in range(5)]
    move(tmp_path, saved, loaded)
    assert loaded["scheduler"].state_dict() == saved["scheduler"].state_dict()
    assert loaded["scheduler"].seq_length == 8
    assert loaded["rate"].tokens == 50
    assert loaded["rate"].get_last_lr() == saved["rate"].get_last_lr() != [1.0]
    assert torch.equal(loaded["model"].weight, saved["model"].weight)
    assert head + list(loaded["loader"]) == batches
