"""Sequence-length warmup and ALiBi in Composer's Trainer: `python examples/train_composer.py --steps 60`.

The import is the only line that differs from Composer's own algorithms. A tiny GPT-2, built here without a download,
learns the source of Python's argparse module as bytes.
"""

import argparse
from pathlib import Path

import torch
from composer import Callback, Trainer
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from seqwarm_kernels.trainers.composer import Alibi, SeqLengthWarmup

FULL_LENGTH = 128


class Print(Callback):
    def __init__(self, every: int) -> None:
        self.every = every

    def batch_end(self, state, logger) -> None:
        step = int(state.timestamp.batch)
        if step % self.every == 0:
            print(f"step {step:>4}  length {state.batch['labels'].shape[1]:>4}  loss {state.loss.item():.3f}")


def loader() -> DataLoader:
    """Batches at the full length."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    rows = [{"input_ids": row, "labels": row} for row in text.unfold(0, FULL_LENGTH, FULL_LENGTH // 2)]
    return DataLoader(rows, batch_size=8, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model = HuggingFaceModel(GPT2LMHeadModel(config))
    trainer = Trainer(
        model=model,
        train_dataloader=loader(),
        max_duration=f"{steps}ba",
        # Grow from 16 tokens to the full length over the first 30 % of the training.
        algorithms=[
            # The default, 0.25, would cut every row into four, as Composer's does.
            Alibi(max_sequence_length=FULL_LENGTH, train_sequence_length_scaling=1.0),
            SeqLengthWarmup(duration=0.3, min_seq_length=16, max_seq_length=FULL_LENGTH),
        ],
        optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3),
        callbacks=[Print(max(1, steps // 6))],
        progress_bar=False,
        seed=0,
    )
    trainer.fit()


if __name__ == "__main__":
    main()
