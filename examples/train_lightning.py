"""Sequence-length warmup and ALiBi in Lightning's Trainer: `python examples/train_lightning.py --steps 60`.

A model of one layer learns the source of Python's argparse module as bytes.
"""

import argparse
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

import seqwarm_kernels as sw
from seqwarm_kernels.trainers.lightning import SequenceLengthWarmup

FULL_LENGTH, WIDTH, HEADS = 128, 64, 4


class Module(LightningModule):
    def __init__(self, print_every: int) -> None:
        super().__init__()
        self.print_every = print_every
        self.embedding = nn.Embedding(256, WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        heads = self.query_key_value(hidden).unflatten(-1, (3, HEADS, -1))  # (B, S, 3, H, D)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
        # 1. ALiBi instead of a position embedding: the model accepts any length.
        attended = sw.alibi_attention(query, key, value, sw.alibi_slopes(HEADS, device=hidden.device))
        return self.head(hidden + attended.transpose(1, 2).flatten(2))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Gets batches of the scheduled length."""
        loss = F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        if batch_idx % self.print_every == 0:
            print(f"step {batch_idx:>4}  length {batch['labels'].shape[1]:>4}  loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def loader() -> DataLoader:
    """Batches at the full length."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in text.unfold(0, FULL_LENGTH + 1, FULL_LENGTH // 2)]
    return DataLoader(rows, batch_size=8, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(0, verbose=False)

    # 2. Grow from 16 tokens to the full length over the first 30 % of the steps.
    warmup = SequenceLengthWarmup(sw.SequenceLengthScheduler(16, FULL_LENGTH, duration=0.3 * steps))
    trainer = Trainer(
        max_steps=steps,
        callbacks=[warmup],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(max(1, steps // 6)), loader())


if __name__ == "__main__":
    main()
