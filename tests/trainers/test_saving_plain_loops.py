"""Accelerate and Fabric save and load a schedule and a learning rate by tokens as they do a model."""

import pytest
import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler, TokenLR


def made():
    """All parts of a training."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = SequenceLengthScheduler(4, 16, duration=100, step_size=4, unit="token")
    rate = TokenLR(optimizer, warmup_tokens=10, decay_tokens=100)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rate": rate}


def trained():
    parts = made()
    parts["scheduler"].step(50)
    parts["rate"].step(50)
    return parts


def assert_continues(parts, saved):
    assert parts["scheduler"].state_dict() == saved["scheduler"].state_dict()
    assert parts["scheduler"].seq_length == 8
    assert parts["rate"].tokens == 50
    assert parts["rate"].get_last_lr() == saved["rate"].get_last_lr() != [1.0]
    assert torch.equal(parts["model"].weight, saved["model"].weight)


def test_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def accelerator_of(parts):
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(parts["model"], parts["optimizer"])
        accelerator.register_for_checkpointing(parts["scheduler"], parts["rate"])
        return accelerator

    saved, parts = trained(), made()
    accelerator_of(saved).save_state(str(tmp_path))
    accelerator_of(parts).load_state(str(tmp_path))
    assert_continues(parts, saved)


def test_fabric(tmp_path):
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    saved, parts = trained(), made()
    fabric.save(tmp_path / "state.ckpt", saved)
    fabric.load(tmp_path / "state.ckpt", parts)
    assert_continues(parts, saved)
