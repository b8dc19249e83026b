"""Sequence-length warmup and ALiBi in a plain PyTorch loop: `python examples/train_plain.py --steps 20`.

A tiny byte-level model learns the source of Python's argparse module. Steps 1 to 4 are what your own loop needs.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqwarm_kernels as sw

FULL_LENGTH, BATCH_SIZE, WIDTH, HEADS = 128, 8, 64, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.query_key_value(self.norm_1(hidden)).unflatten(-1, (3, HEADS, -1))  # (B, S, 3, H, D)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
        # 1. ALiBi instead of a position embedding: the model accepts any length.
        attended = sw.alibi_attention(query, key, value, sw.alibi_slopes(HEADS, device=hidden.device))
        hidden = hidden + self.project(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.norm_2(hidden))


class Model(nn.Sequential):
    def forward(self, input_ids: Tensor) -> Tensor:  # the argument has the name of the entry in the batch
        return super().forward(input_ids)


def loss_fn(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def random_batch(text: Tensor) -> dict[str, Tensor]:  # at the full length, as from a data loader
    starts = torch.randint(len(text) - FULL_LENGTH, (BATCH_SIZE, 1))
    tokens = text[starts + torch.arange(FULL_LENGTH + 1)]
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()), device=device)
    model = Model(nn.Embedding(256, WIDTH), Layer(), Layer(), nn.Linear(WIDTH, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # 2. Grow from 16 tokens to the full length over the first 30 % of the steps.
    scheduler = sw.SequenceLengthScheduler(16, FULL_LENGTH, duration=0.3 * steps, unit="step")

    # 3. Claim the memory of the longest batch before the first step. Model and optimizer do not change.
    batch = random_batch(text)
    print(
        sw.warmup_allocator(
            model, FULL_LENGTH, example_batch=batch, loss_fn=loss_fn, optimizer=optimizer, scheduler=scheduler
        )
    )
    for step in range(steps):
        # 4. Cut the batch to the current length, and count each step.
        batch = scheduler.resize(random_batch(text))
        loss = loss_fn(model(batch["input_ids"]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"step {step:>5}  length {batch['labels'].shape[1]:>4}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
